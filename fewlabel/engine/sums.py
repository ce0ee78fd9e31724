"""How the server adds models up in whole numbers, and the sum of models that sites hide by masks."""

from fewlabel.core import fixed, updates
from fewlabel.experiment import Experiment


def largest(experiment: Experiment) -> float:
    """Return the largest number that an upload may hold."""
    return updates.LARGEST if experiment.clients.sums == "float" else fixed.LARGEST
