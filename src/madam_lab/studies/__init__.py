"""Measurements that are not training runs, by name: the theory's assumption and its bound, on real networks."""

from madam_lab.studies import breakdown, largest
from madam_lab.studies.study import Point, Study, get, names

__all__ = ["Point", "Study", "breakdown", "get", "largest", "names"]
