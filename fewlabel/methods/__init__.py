"""The methods by name, each with its settings. A new one is one new file and one line here."""

from typing import Any

from fewlabel.methods.fedavg import FedAvg

METHODS: dict[str, Any] = {
    "fedavg": FedAvg(),
    "fedprox": FedAvg(proximal=0.01, weights="uniform"),
}
