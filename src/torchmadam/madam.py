"""The optimiser: groups, state and the loop over parameters. The mathematics is in update.py."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from torchmadam import groups, held, noise, replaced, shards
from torchmadam.kernels import ops
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.repeat import Repeats, is_launched, situation_of
from torchmadam.start import warn_unmatched
from torchmadam.state import OLDER, STATE_VERSION, Exact, shield
from torchmadam.watch import Watch


class Madam(Optimizer):
    """Multiplicative Adam: weights move in units of their own size, or their tensor's, so one lr serves all networks.

    ``Madam(model.parameters())`` is meant to be used as it stands, with a learning rate that falls to zero towards the
    end. It generalises Algorithm 1 of Bernstein et al., *Learning compositional functions via multiplicative weight
    updates* (NeurIPS 2020), which is :meth:`paper`: here small weights can cross zero, steps follow a mean of the
    gradient, and weights decay. The paper's symbols are in brackets.

    Args:
        params: parameters, ``named_parameters()`` or param groups.
        lr: the step of a weight whose gradients agree, as a share of its size or, if it is small, of 5 sigma [eta]; a
            float or a 1-element tensor.
        beta: the memory of the second moment [beta].
        momentum: the memory of the first moment, a mean of the gradient that steps follow instead of the last one;
            in two bytes a weight. 0: none, as in the paper, and no state for it. For codes it is a mean of steps, each
            with the ``lr`` that it was made with, and also holds what stochastic rounding drops, for the steps to come.
        max_step: the largest step in units of ``lr`` [eta*/eta].
        bound: matrices are clamped to this many sigma [sigma*/sigma], or to the largest weight that they begin with;
            biases and other vectors to 20 times ``bound``, which is 100. None: no clamp. Where weights may not cross
            zero, or ``scale`` is given, everything is clamped to ``bound`` sigma.
        crossing: steps are additive for weights below ``crossing`` x ``bound`` x sigma (``crossing`` x sigma without a
            bound), so that they can pass through zero, and relative above. None: 5 sigma, or ``bound`` sigma if that is
            less. 0 is the paper's rule, under which no weight ever changes sign.
        scale: sigma. None measures the RMS of each tensor at its first step; a number sets it for all; a mapping such
            as :func:`torchmadam.scales_of` gives sets it by name, when the parameters come with names.
        zero_scale: sigma of vectors that are all zeros (biases, mostly), or next to zero: with an RMS below a hundredth
            of this, as LayerScale's gains. That of such matrices is 0.5 over the root of their inputs, if that is more
            (not under the paper's rule; there zeros have a zone of ``bound`` sigma, since nothing multiplied by zero
            moves). 0 leaves them at zero.
        second_moment: "float32"; "8bit" for one byte a weight, which keeps the usual size of a gradient to within a
            quarter; or "none" for the sign of g, or of its mean, which moves a weight by whole steps for a hundred
            steps or two after its last gradient (rows of an embedding, say), and takes nothing of what rounding drops;
            with ``momentum=0`` that is the rule of the paper's theorem, with no state per weight.
        bias_correction: divide the second moment by 1 - beta^t. The paper's text has none; its experiments did.
        rounding: of codes, for which None is their ladder's own; and of bfloat16 and float16 parameters, for which None
            is "stochastic". Under "nearest", relative steps below 0.4 % (bfloat16) or 0.05 % (float16) round away, so
            that training stops when lr decays.
        seed: of the stochastic rounding.
        weight_decay: multiplies weights by exp(-lr weight_decay): 0.2 at 0.01 is what 2 is to AdamW at 0.001.
        maximize: climb instead of descending.
        compile: on a CPU, step float32 and bfloat16 parameters and codes in one pass over memory, more than ten times
            as fast, with code that a C compiler builds in a second or two at the first step. Floats are rounded
            differently in the last place; codes are the same. Other dtypes, and tensors with gaps in memory, step as
            without it; so does a GPU, whose kernels make one pass anyway.

    ``bound``, ``crossing``, ``scale`` and ``zero_scale`` are for floats: codes have theirs from
    :func:`torchmadam.to_ladder_`.

    A gradient element that is not finite, or whose square is above 2^126, leaves its weight and its second moment
    as they are; :meth:`nonfinite_count` says how many there were.
    """

    _built = False
    _replacements = 0  # that were looked at
    # PyTorch's name: whether a GradScaler hands over its scale. release_gradients sets it, to refuse it.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        *,
        beta: float = 0.999,
        momentum: float = 0.9,
        max_step: float = 8.0,
        bound: float | None = 5.0,
        crossing: float | None = None,
        scale: float | Mapping[str, float] | None = None,
        zero_scale: float = 0.01,
        second_moment: Literal["float32", "8bit", "none"] = "float32",
        bias_correction: bool = True,
        rounding: Literal["nearest", "stochastic"] | None = None,
        seed: int = 0,
        weight_decay: float = 0.2,
        maximize: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta": beta,
            "momentum": momentum,
            "max_step": max_step,
            "bound": bound,
            "crossing": crossing,
            "scale": scale,
            "zero_scale": zero_scale,
            "second_moment": second_moment,
            "bias_correction": bias_correction,
            "rounding": rounding,
            "seed": seed,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "compile": compile,
            "state_version": STATE_VERSION,
        }
        super().__init__(params, defaults)
        warn_unmatched(self.param_groups)
        self._watch = Watch()
        self._repeats = Repeats()
        self._built = True

    @classmethod
    def paper(cls, params: ParamsT, lr: float | Tensor = 0.01, **arguments: Any) -> "Madam":
        """The paper's Algorithm 1 with the bias correction of its experiments, whatever the defaults are.

        No crossing, a bound of 3, no momentum, no weight decay. Other arguments are those of the class.
        """
        rule = {"beta": 0.999, "momentum": 0.0, "max_step": 8.0, "bound": 3.0, "crossing": 0.0, "bias_correction": True}
        return cls(params, lr, **{**rule, "second_moment": "float32", "weight_decay": 0.0, **arguments})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; arguments it does not give are the constructor's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in groups.NUMBERS:
            if isinstance(group[name], Real):  # NumPy's numbers among them
                group[name] = float(group[name])
        try:
            groups.check(group, self.defaults)
        except Exception:
            self.param_groups.pop()
            raise
        if isinstance(group["scale"], Mapping):
            group["scale"] = {groups.unwrapped(name): float(scale) for name, scale in group["scale"].items()}
        if self._built:
            warn_unmatched(self.param_groups[-1:], self.param_groups[:-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """Move the parameters of one group, or of a part of one, that have gradients. :meth:`step` does all groups."""
        if torch.compiler.is_compiling():
            self._step_group(group)
            return
        self._check_capture(group["lr"])
        self._check_replaced()
        coded = _has_codes(group["params"])
        self._watch.look(group, self.state, coded=coded)
        situation = situation_of(group, self.state) if is_launched(group) else None
        if situation is None or not self._repeats.again(situation, group["lr"]):
            launches = self._step_group(group)
            # Not if the step itself moved something, such as a moment that changed its kind or its order.
            after = situation_of(group, self.state) if situation is not None and launches else None
            if situation is not None and launches and after is not None and after.key == situation.key:
                self._repeats.keep(situation, launches, sum(len(g["params"]) for g in self.param_groups))
        if coded:
            torch.clear_autocast_cache()  # which may hold casts of the weights as they were

    def _step_group(self, group: dict[str, Any]) -> list[Any] | None:
        """A step of one group. Where only kernels ran, returns functions of lr that make the same step again."""
        return self._step_uncompiled(group) if group["second_moment"] == "8bit" else self._step_parts(group)

    @_disable_dynamo  # Inductor on a CPU leaves out the last, smaller group of exponents (torch 2.13)
    def _step_uncompiled(self, group: dict[str, Any]) -> list[Any] | None:
        return self._step_parts(group)

    def _step_parts(self, group: dict[str, Any]) -> list[Any] | None:
        launches: list[Any] | None = []
        if _has_codes(group["params"]):
            launches = self._step_coded(group)
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        moments: list[Tensor] = []
        exponents: list[Tensor] = []
        steps: list[Tensor] = []
        scales: list[Tensor] = []
        nonfinite: list[Tensor] = []
        streams: list[int] = []
        crossings: list[float] = []
        firsts: list[int] = []
        self._init_group(
            group, params, grads, means, moments, exponents, steps, scales, nonfinite, streams, crossings, firsts
        )
        if not params:
            return launches
        own = ops.float_step_(
            [groups.as_real(p) for p in params],
            [groups.as_real(g) for g in grads],
            means,
            moments,
            exponents,
            steps,
            scales,
            nonfinite,
            streams=streams,
            crossings=crossings,
            bound=group["bound"],
            compile=group["compile"],
            firsts=firsts if any(firsts) else (),
            **self._rule(group),
        )
        return None if launches is None or own is None else launches + own

    @_disable_dynamo  # torch.compiler.disable would import the whole compiler with this module
    def _step_coded(self, group: dict[str, Any]) -> list[Any] | None:
        params = [p for _, p in held.ready(group, self.state, self.param_groups, coded=True)]
        if not params:
            return []
        states = [self.state[p] for p in params]
        rows = [held.rows_of(p) for p in params]
        launches = ops.coded_step_(
            [planes for planes, _ in rows],
            [coding for _, coding in rows],
            [shards.local(p.grad) for p in params],
            [shards.local(state["step_moment"]) for state in states if group["momentum"]],
            [shards.local(state["second_moment"]) for state in states if group["second_moment"] != "none"],
            [state["exponents"] for state in states if group["second_moment"] == "8bit"],
            [state["step"] for state in states],
            [state["nonfinite"] for state in states],
            streams=[noise.stream(group["seed"], state["index"]) for state in states],
            compile=group["compile"],
            **self._rule(group),
        )
        torch.autograd.graph.increment_version(params)
        return launches

    @staticmethod
    def _rule(group: dict[str, Any]) -> dict[str, Any]:
        """The arguments that a step of floats and a step of codes share."""
        lr = group["lr"]
        names = ("momentum", "beta", "max_step", "weight_decay", "bias_correction", "rounding", "maximize")
        return {"lr": lr.reshape(()) if isinstance(lr, Tensor) else lr, **{name: group[name] for name in names}}

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        moments: list[Tensor],
        exponents: list[Tensor],
        steps: list[Tensor],
        scales: list[Tensor],
        nonfinite: list[Tensor],
        streams: list[int],
        crossings: list[float],
        firsts: list[int],
    ) -> None:
        """Fill the lists with the group's tensors, making state where there is none yet.

        The name and the shape of this method are PyTorch's: ``torch.compile`` runs it outside the graph it traces.
        """
        self._check_replaced()  # for a step that is being compiled
        for name, p in held.ready(group, self.state, self.param_groups, coded=False):
            state = self.state[p]
            params.append(shards.local(p))
            grads.append(shards.local(p.grad))
            firsts.append(groups.first_of(group, name, p))
            if group["momentum"]:
                means.append(shards.local(state["first_moment"]))
            if group["second_moment"] != "none":
                moments.append(shards.local(state["second_moment"]))
            if group["second_moment"] == "8bit":
                exponents.append(state["exponents"])
            steps.append(state["step"])
            scales.append(state["scale"])
            nonfinite.append(state["nonfinite"])
            streams.append(noise.stream(group["seed"], state["index"]))
            crossings.append(held.crossing_of(group, state))

    def _check_replaced(self) -> None:
        if self._replacements != replaced.count():
            replaced.check([p for group in self.param_groups for p in group["params"]])
            self._replacements = replaced.count()

    @staticmethod
    def _check_capture(lr: float | Tensor) -> None:
        if torch.compiler.is_compiling() or not torch.cuda.is_available():
            return
        if torch.cuda.is_current_stream_capturing() and not (isinstance(lr, Tensor) and lr.is_cuda):
            raise RuntimeError(
                "lr is not a CUDA tensor, so a CUDA graph would replay the value it has now for ever; "
                "use lr=torch.tensor(0.01, device='cuda'), after one step outside the capture"
            )

    def nonfinite_count(self) -> int:
        """How many gradient elements have been skipped so far, over all parameters and steps, as not finite.

        Of what is spread over ranks, those that were skipped here.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for state in filter(None, self.state.values()):
            by_device.setdefault(state["nonfinite"].device, []).append(state["nonfinite"])
        return sum(int(torch.stack(counts).sum()) for counts in by_device.values())

    def state_dict(self) -> dict[str, Any]:
        """State and groups, as of any optimiser."""
        if any("exponents" in own and shards.is_sharded(p) for p, own in self.state.items()):
            raise RuntimeError(
                "the groups of a sharded 8-bit moment end with the shard, so torch.distributed.checkpoint would mix up "
                "their exponents; use torchmadam.distributed.save and load"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; every tensor keeps its dtype and goes to its parameter's device."""
        # Appended last, so that the user's own hooks may still translate the dict.
        hook = self.register_load_state_dict_pre_hook(shield)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, a deepcopy or :meth:`load_state_dict`."""
        super().__setstate__(state)
        for name, value in {"compile": False, **OLDER}.items():  # a pickle may be older than these arguments
            self.defaults.setdefault(name, value)
        self.defaults.pop("differentiable", None)  # the base class's own addition; Madam has no such argument
        self.__dict__.setdefault("_watch", Watch())
        self.__dict__.setdefault("_repeats", Repeats())
        self._built = True
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            held.renew(group, self.state)
            group["state_version"] = STATE_VERSION
        for p, own in self.state.items():
            for name, value in own.items():
                if isinstance(value, Exact):
                    own[name] = value.on(p.device)
            for name in (*held.MEANS, "second_moment"):
                if name in own:
                    own[name] = shards.part_of(own[name], p)


def _has_codes(params: list[Tensor]) -> bool:
    if shards.are_any(params, LadderTensor):
        return True
    return shards.are_any_sharded(params) and any(map(held.is_coded, params))
