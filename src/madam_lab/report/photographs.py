"""ResNet-50 on photographs: Imagenette, which is not ImageNet, and the speed of training at ImageNet's size."""

from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

_FULL = 224  # pixels a side
KINDS = {
    "imagenette_sgd": "SGD",
    "imagenette_adam": "Adam",
    "imagenette_madam": "Madam",
    "imagenette_madam_12bit": "12-bit Madam",
    "imagenette_madam_8bit": "8-bit Madam",
}


def imagenette_table(results: Results) -> Table:
    """Errors of all kinds of weights; and of those whose scales came from a trained model, where somebody ran them."""
    rows, ours = [], []
    for name, title in KINDS.items():
        lent = sorted(n for n in results.by_recipe if n.startswith(f"{name}+scales=") and "+smoke" not in n)
        for each, suffix in ((name, ""), *((n, ", scales of a trained model") for n in lent)):
            rows.append((title + suffix, results.ours(each, "train"), results.ours(each)))
            ours += results.of(each)
    note = (
        "Ten classes of ImageNet at 112 pixels, 90 epochs of ResNet-50 under the paper's ImageNet recipe. This is not "
        "ImageNet, and none of these numbers is in the paper."
    )
    return Table("Imagenette, not ImageNet", note, ("", "train error %", "top-1 error %"), rows, ours)


def throughput_table(results: Results) -> Table:
    """Pictures a second at full size, from results/bench."""
    head = ("", "pictures a second", "of SGD's")
    found = [bench for bench in results.benchmarks if bench.get("imagenet", {}).get("side") == _FULL]
    if not found:
        return Table("ResNet-50 at full size", "Not measured yet.", head, [], [])
    bench = found[-1]
    about, speeds = bench["imagenet"], bench["imagenet"]["rows"]
    peer = speeds.get("SGD momentum fused")
    rows = [(name, f"{speed:,.0f}", f"{speed / peer:.2f}" if peer else "") for name, speed in speeds.items()]
    note = (
        f"{bench['device']}, torch {bench['versions']['torch']}, commit {bench['commit'][:7]}. Batches of "
        f"{about['batch']} generated pictures of {about['side']} pixels and {about['classes']:,} classes; no loader."
    )
    return Table("ResNet-50 at full size", note, head, rows, rows)


TABLES = {"imagenette": imagenette_table, "throughput": throughput_table}
