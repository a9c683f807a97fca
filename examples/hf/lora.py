"""LoRA adapters on a base of frozen codes: the base takes 8 or 12 bits a weight, the adapters are floats and learn.

python -m examples.hf.lora README.md docs/*.md --base hf-model --out my-adapter
"""

import argparse
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.hf.text import pieces
from examples.hf.trainer import trainer
from torchmadam import hf, summary


def with_adapters(base: PreTrainedModel, rank: int = 4) -> PeftModel:
    """The base, frozen, with a pair of float matrices A and B beside every attention and MLP matrix.

    B starts as zeros, which no multiplication moves; Madam moves matrices of zeros on the scale of their inputs.
    """
    config = LoraConfig(r=rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(base, config)


def main(arguments: list[str] | None = None) -> None:
    """Train adapters on text files, save them, and put them back onto the base."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="+", type=Path)
    parser.add_argument("--base", default="hf-model", help="a model that examples.hf.trainer saved, or any GPT-2")
    parser.add_argument("--bits", help="take these codes, where the base is floats")
    parser.add_argument("--out", type=Path, default=Path("hf-adapter"))
    parser.add_argument("--epochs", type=float, default=3)
    given = parser.parse_args(arguments)

    bits = int(given.bits) if given.bits and given.bits.isdigit() else given.bits
    config = {"quantization_config": hf.LadderConfig(bits)} if bits else {}
    model = with_adapters(AutoModelForCausalLM.from_pretrained(given.base, **config))
    length = model.config.n_positions
    data = pieces(given.text, length)
    run = trainer(model, data, given.out, num_train_epochs=given.epochs)
    run.train()
    model.save_pretrained(given.out)
    print(summary(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(given.base, **config), given.out)))


if __name__ == "__main__":
    main()
