"""Tiny data for every test that asks for it."""

import numpy as np
import pytest

from tiny_data import lay_cifar, lay_inception, lay_photographs, lay_wikitext


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with tiny versions of all data sets."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    lay_cifar(root, rng)
    lay_wikitext(root, rng)
    lay_inception(root)
    lay_photographs(root, rng)
    return root


@pytest.fixture(autouse=True)
def _tiny_is_whole(monkeypatch, request):
    """Tasks take the tiny data for the real."""
    if "tiny" in request.fixturenames:
        from madam_lab.tasks import TASKS
        from madam_lab.tasks.wikitext import read_words

        root = request.getfixturevalue("tiny")
        monkeypatch.setattr(TASKS["cifar10"], "sizes", (45, 9))
        monkeypatch.setattr(TASKS["cifar100"], "sizes", (40, 20))
        sizes = {name: len(words) for name, words in read_words(root)[0].items()}
        monkeypatch.setattr(TASKS["wikitext2"], "sizes", sizes)
