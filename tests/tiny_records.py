"""Records as the trainer would write them."""

from madam_lab import recipes


def made(name, seed=0, test=5.0, train=1.0, **changes):
    """A record as the trainer would write it, with these numbers."""
    recipe = recipes.get(name)
    axis = "valid" if recipe.task == "wikitext2" else "test"
    curve = [
        {"epoch": e, "lr": 0.01, "loss": 1.0, "train": train, axis: (test or 50.0) + (10 - e)} for e in range(1, 11)
    ]
    codes = None
    if recipe.ladder is not None:
        codes = [{"epoch": e, "histogram": [1 / 64] * 64, "upper": 0.1, "lower": 0.02} for e in (0, 5, 10)]
    record = {
        "schema": 1, "recipe": name, "settings": recipe.settings(), "overrides": {}, "seed": seed, "status": "finished",
        "metric": "test error %", "test": test, "train": train, "curve": curve, "weights": 1000,
        "bytes": {"weights": 1625 if recipe.ladder else 4000, "optimiser": 4000, "float32": 4000}, "codes": codes,
        "seconds": 10.0, "started": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "dirty": False, "source": "0" * 16,
        "versions": {"torchmadam": "0.2.0"}, "device": "CPU",
    }  # fmt: skip
    return {**record, **changes}
