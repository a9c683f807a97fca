"""The Hugging Face examples: Trainer, save_pretrained and back, Accelerate, adapters on frozen codes."""

import json

import pytest
import torch

import torchmadam
from torchmadam import LadderTensor, Madam, to_ladder_

transformers = pytest.importorskip("transformers", reason='needs pip install ".[hf]"')

from examples.hf import accelerated, convert, lora, trainer  # noqa: E402
from examples.hf.text import pieces, small_gpt2  # noqa: E402

from madam_lab import records  # noqa: E402
from madam_lab.report.conversion import conversion_table  # noqa: E402
from madam_lab.report.numbers import Results  # noqa: E402
from torchmadam import hf  # noqa: E402

# Their own: about a CPU without pinned memory, and about names in PyTorch that will go.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LENGTH = 16
QUIET = {"disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 8, "save_strategy": "steps"}
KINDS = [None, 12, "signed8"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat, and the dog did not. " * 30, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(text):
    return pieces([text], LENGTH)


def gpt2(bits, seed=0):
    model = small_gpt2(LENGTH, layers=1, width=32, seed=seed)
    return model if bits is None else trainer.coded(model, bits)


def llama(bits, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    return model if bits is None else trainer.coded(model, bits)


def bert(bits, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=256, **sizes))
    return model if bits is None else trainer.coded(model, bits)


def assert_same(a, b):
    left, right = (dict(m.named_parameters(remove_duplicate=False)) for m in (a, b))
    assert left.keys() == right.keys()
    for name, p in left.items():
        assert isinstance(p, LadderTensor) == isinstance(right[name], LadderTensor), name
        assert torch.equal(p, right[name]), name
        if isinstance(p, LadderTensor):
            assert p.coding == right[name].coding
            assert torch.equal(p.codes(), right[name].codes()), name


@pytest.mark.parametrize("bits", KINDS)
def test_a_trainer_learns_and_one_that_was_stopped_ends_as_one_that_was_not(bits, data, tmp_path):
    arguments = {**QUIET, "max_steps": 8, "save_steps": 4, "logging_steps": 1, "weight_decay": 0.1}
    arguments["bf16"] = bits == "signed8"  # mixed precision, once
    whole = trainer.trainer(gpt2(bits), data, tmp_path, **arguments)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    optimizer = whole.optimizer.optimizer
    assert isinstance(optimizer, Madam)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    halves = trainer.trainer(gpt2(bits, seed=1), data, tmp_path, **arguments)
    halves.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(whole.model, halves.model)


@pytest.mark.parametrize("make", [gpt2, llama, bert])
@pytest.mark.parametrize("bits", KINDS)
def test_save_pretrained_and_from_pretrained_keep_every_code(make, bits, tmp_path):
    model = make(bits)
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path)
    assert_same(model, back)
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, back(tokens).logits)
    if bits is not None:
        other = make(None, seed=1)
        torchmadam.load(tmp_path / "model.safetensors", other)  # it is an ordinary file of ours
        assert_same(model, other)
        assert_same(back.dequantize(), torchmadam.to_dense_(model))
        assert not back.is_quantized


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=16, **sizes))


def mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=2, **sizes)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("make", [vit, mixtral])
def test_models_whose_weights_transformers_renames_on_saving_keep_every_code(make, tmp_path):
    model = hf.register_(to_ladder_(make(), "paper12"))
    model.save_pretrained(tmp_path)
    assert_same(model, type(model).from_pretrained(tmp_path))
    torchmadam.load(tmp_path / "model.safetensors", to_ladder_(make(), "paper12"))
    assert not any(isinstance(p, LadderTensor) for p in model.dequantize().parameters())  # after it was saved, too


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_coded_model_decodes_to_the_dtype_that_was_asked_for_or_to_its_own(stored, tmp_path):
    model = small_gpt2(LENGTH, layers=1, width=32).to(stored)
    hf.register_(to_ladder_(model, "signed8", filter=lambda name, p: p.dim() > 1)).save_pretrained(tmp_path)
    other = torch.bfloat16 if stored == torch.float32 else torch.float32
    for given, expected in (({}, stored), ({"dtype": other}, other), ({"dtype": "auto"}, stored)):
        back = type(model).from_pretrained(tmp_path, **given)
        assert {p.dtype for p in back.parameters()} == {expected} == {back.dtype, back.config.dtype}
        for p, q in zip(model.parameters(), back.parameters(), strict=True):
            if isinstance(p, LadderTensor):
                assert torch.equal(p.codes(), q.codes())


def test_floats_beside_codes_keep_their_own_dtype(tmp_path):
    model = small_gpt2(LENGTH, layers=1, width=32)
    to_ladder_(model, "paper12", dtype=torch.bfloat16, filter=lambda name, p: p.dim() > 1)
    hf.register_(model).save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path)
    assert_same(model, back)
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16, torch.float32}


def test_a_model_in_several_files_is_put_together_and_checked(tmp_path):
    model = gpt2(12)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(model, type(model).from_pretrained(tmp_path))
    damaged = bytearray(shards[1].read_bytes())
    damaged[-9] ^= 1
    shards[1].write_bytes(damaged)
    with pytest.raises(torchmadam.LadderFileError, match="checksum"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("bits", [12, "signed8"])
def test_trained_floats_become_their_nearest_codes_as_they_are_loaded(bits, tmp_path):
    model = gpt2(None)
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path, quantization_config=hf.LadderConfig(bits))
    assert_same(to_ladder_(model, bits, init="nearest"), back)
    back.save_pretrained(tmp_path / "coded")
    assert_same(back, type(model).from_pretrained(tmp_path / "coded"))
    with pytest.raises(ValueError, match="does not say which codes"):
        type(model).from_pretrained(tmp_path, quantization_config=hf.LadderConfig())


def test_a_model_of_another_ladder_is_not_resumed_from(data, tmp_path):
    arguments = {**QUIET, "max_steps": 2, "save_steps": 1}
    trainer.trainer(gpt2(12), data, tmp_path, **arguments).train()
    with pytest.raises(RuntimeError, match="one ladder"):
        trainer.trainer(gpt2("signed8"), data, tmp_path, **arguments).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def test_a_float_model_made_with_the_same_config_stays_one(tmp_path):
    coded = small_gpt2(16)
    dense = type(coded)(coded.config)
    hf.register_(to_ladder_(coded, "paper12"))
    assert coded.config is coded.transformer.config is not dense.config
    dense.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = type(dense).from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, dense.lm_head.weight)


def test_a_float_model_need_not_be_registered():
    with pytest.raises(ValueError, match="no weight of this model is coded"):
        hf.register_(gpt2(None))


@pytest.mark.parametrize("bits", KINDS)
def test_accelerate_goes_on_from_a_saved_state_as_if_it_had_not_stopped(bits, data, tmp_path):
    data, arguments = data[:32], {"gradient_accumulation_steps": 2, "cpu": True}
    loop = accelerated.Loop(data, LENGTH, bits, **arguments)
    first = list(loop.epoch())
    assert {int(state["step"]) for state in loop.optimizer.state.values()} == {2}  # four batches, accumulated
    loop.accelerator.save_state(str(tmp_path))
    second = list(loop.epoch())
    other = accelerated.Loop(data, LENGTH, bits, **arguments)
    other.accelerator.load_state(str(tmp_path))
    assert list(other.epoch()) == second
    assert second[-1] < first[0]
    assert_same(loop.model, other.model)


def test_adapters_learn_on_a_base_of_codes_that_stays_as_it_is(data, tmp_path):
    base = gpt2(12)
    base.save_pretrained(tmp_path / "base")
    model = lora.with_adapters(base)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and type(p) is torch.nn.Parameter for name, p in trained.items())
    zeros = {name for name, p in trained.items() if not p.any()}
    assert zeros == {name for name in trained if "lora_B" in name}
    steps = {"max_steps": 20, "logging_steps": 1}
    run = trainer.trainer(model, data, tmp_path / "run", **{**QUIET, **steps})
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.1
    for name in zeros:
        assert (trained[name] != 0).float().mean() > 0.9, name

    model.save_pretrained(tmp_path / "adapter")
    fresh = type(base).from_pretrained(tmp_path / "base")
    before = {name: p.codes() for name, p in fresh.named_parameters()}
    back = lora.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, back.eval()(tokens).logits)
    after = {name.replace("base_layer.", ""): p for name, p in base.named_parameters() if "lora_" not in name}
    assert all(torch.equal(after[name].codes(), codes) for name, codes in before.items())
    with pytest.raises(TypeError, match="to_dense_"):
        back.merge_and_unload()
    merged = torchmadam.to_dense_(back).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-4)


def test_the_commands_run_one_after_another(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer.main([str(text), "--bits", "12", "--epochs", "0.1", "--length", "16"])
    assert "signed 12-bit, crossing 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "hf-model" / "config.json").read_text())["quantization_config"] == {
        "bits": None,
        "quant_method": "torchmadam",
    }
    lora.main([str(text), "--epochs", "0.1"])
    assert "lora_B" in capsys.readouterr().out
    accelerated.main([str(text)])
    assert "mean loss" in capsys.readouterr().out


def test_the_study_of_conversion_writes_a_record_that_becomes_a_table(text, tmp_path, monkeypatch):
    for name in ("train", "valid"):
        path = tmp_path / "data" / "wikitext-2" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.read_bytes())
    monkeypatch.setenv("MADAM_DATA", str(tmp_path / "data"))
    convert.main(["--smoke", "--results", str(tmp_path)])
    path = tmp_path / "conversion_gpt2+smoke" / "0.json"
    record = records.read(path)
    points = {(point["rule"], point["kind"]): point for point in record["points"]}
    assert len({point["before"] for point in points.values()}) == 1
    for (_, kind), point in points.items():
        assert point["after"] != point["switch"]
        if kind == "float32":
            assert point["switch"] == point["before"]  # nothing was converted
        else:
            assert 0 < abs(point["switch"] - point["before"]) < 0.05
    eight = [points[rule, "signed8"] for rule in ("Madam", "Madam.paper")]
    assert eight[0]["switch"] == eight[1]["switch"]
    assert eight[0]["after"] != eight[1]["after"]
    record["study"] = "conversion_gpt2"
    records.write(record, tmp_path)
    path.unlink()
    table = conversion_table(Results(tmp_path))
    assert [row[0] for row in table.rows] == [
        "AdamW goes on, float32", "Madam, no decay, float32", "Madam, no decay, signed 12-bit codes",
        "Madam, no decay, signed 8-bit codes", "the paper's Madam, float32",
        "the paper's Madam, the paper's 12-bit codes", "the paper's Madam, signed 8-bit codes",
    ]  # fmt: skip
    assert table.rows[5][3] == f"{points['Madam.paper', 'paper12']['switch']:.4f}"
