"""All methods by name, with their settings. To add a method, write one file and add one line here."""

from dataclasses import replace
from typing import Any

from fewlabel.learn.optim import Local
from fewlabel.learn.teacher import MeanTeacher
from fewlabel.methods.cbafed import CBAFed
from fewlabel.methods.fedavg import FedAvg
from fewlabel.methods.fedirm import FedIRM
from fewlabel.methods.fedmatch import FedMatch
from fewlabel.methods.fedmatch_iclr import FedMatchICLR
from fewlabel.methods.fl2 import FL2
from fewlabel.methods.isofed import IsoFed
from fewlabel.methods.proxyfl import ProxyFL
from fewlabel.methods.rscfed import RSCFed
from fewlabel.methods.sage import SAGE
from fewlabel.methods.semifl import SemiFL
from fewlabel.methods.tutor import Tutor
from fewlabel.methods.twinsight import TwinSight

PLAIN_LABELS: dict[str, Any] = {"adaptive": False, "tail": False, "residual": False}

SHARING: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"proximal": 0.01, "weights": "uniform"},
    "local": {"sharing": False},
}

METHODS: dict[str, Any] = {
    "tutor": Tutor(),
    "fedavg": FedAvg(),
    "fedprox": FedAvg(proximal=0.01, weights="uniform"),
    "rscfed": RSCFed(),
    "rscfed-authors": RSCFed(
        teacher=MeanTeacher(weight=0.02, ramp=True, buffers=False, nominal_batch=True),
        warmup=7,
        labeled_share=None,
        labeled_times=6,
        beta_labeled=100,
        distance="summed",
        persistent_optimizer=True,
    ),
    "fedirm": FedIRM(),
    "fedirm-authors": FedIRM(
        passes=11,
        uncertainty=2.0,
        local=Local(epochs=1, batch_size=48, lr=2e-4, optimizer="adam", clip=None),
        relation_weight=0.5,
        warmup=20,
        scale=15,
        squared_ramp=True,
        confidence=0.3,
        mean_logits=True,
        per_batch=True,
        label_smoothing=0.1,
        teacher_decay=0.99,
        weights="uniform",
        persistent_optimizer=True,
    ),
    "cbafed": CBAFed(),
    "cbafed-authors": CBAFed(highest=0.9, blend_from_first=True, label_view="weak", persistent_optimizer=True),
    "isofed": IsoFed(),
    "fedmatch": FedMatch(),
    "fedmatch-sparse": FedMatch(weight_l1=0.01, zero_below=1e-5),
    "fedmatch-iclr": FedMatchICLR(),
    "fedmatch-iclr-server": FedMatchICLR(
        weight_l1=1e-5,
        zero_below=1e-5,
        keep_below=1e-5,
        patience=20,
        local=replace(FedMatchICLR().local, batch_size=100),
    ),
    "semifl": SemiFL(),
    "sage": SAGE(),
    "fl2": FL2(),
    "proxyfl": ProxyFL(),
    "twin-sight": TwinSight(),
    # Baselines of the papers.
    **{
        f"{sharing}-{loss}": FedAvg(local=FedMatch().local, unlabeled=loss, **settings)
        for sharing, settings in SHARING.items()
        for loss in ("fixmatch", "uda")
    },
    "local-sl": FedAvg(local=FedMatch().local, sharing=False),
    "fed-consist": RSCFed(sub_sampling=False, reweighting=False),
    "fed-consist-batch": CBAFed(labeling="batch", labeled_share=0.5, **PLAIN_LABELS),  # as CBAFed's paper has it
    "fed-consist-plus": CBAFed(**PLAIN_LABELS),
    "fed-consistency": FedIRM(relation_weight=0.0),  # as FedIRM's paper has it
    "fed-selftraining": CBAFed(  # with the warm-up that FedIRM's authors give to all rows; without one it collapses
        labeling="refreshed", threshold=0.0, warmup=20, warmup_epochs=1, local=FedIRM().local, **PLAIN_LABELS
    ),
    "fedavg-plus": CBAFed(labeling="none", warmup=0),
    "mt-wfedavg": RSCFed(sub_sampling=False, labeled_share=None, teacher=MeanTeacher(student_view="strong")),
}

ABOUT = {
    **{
        f"{sharing}-{loss}": f"{name} on unlabeled images {how}: a baseline of FedMatch's paper."
        for sharing, how in {"fedavg": "with FedAvg", "fedprox": "with FedProx", "local": "without sharing"}.items()
        for loss, name in {"fixmatch": "FixMatch", "uda": "UDA"}.items()
    },
    "local-sl": "Each client trains alone on its labels: Local-SL of FedMatch's paper, where all images have labels.",
    "fedprox": "FedAvg with a proximal term; all clients count alike.",
    "rscfed-authors": "RSCFed as in its authors' code for SVHN.",
    "fedirm-authors": "FedIRM as in its authors' code.",
    "cbafed-authors": "CBAFed as in its authors' code for SVHN.",
    "fedmatch-iclr": "FedMatch as in its authors' code (ICLR version), for labels at clients; made for resnet9.",
    "fedmatch-iclr-server": "FedMatch as in its authors' code, for labels at the server; made for resnet9.",
    "fedmatch-sparse": "FedMatch with a psi that is pulled towards zero, so that less is sent.",
    "fed-consist": "Mean teachers; labeled clients get half of the weight: Fed-Consist of RSCFed's paper.",
    "fed-consist-batch": "Pseudo-labels for each batch; labeled clients get half of the weight: CBAFed's Fed-Consist.",
    "fed-consist-plus": "Pseudo-labels fixed for a round, with one threshold: Fed-Consist+ of CBAFed's paper.",
    "fed-consistency": "FedIRM without its relations: Fed-Consistency of its paper.",
    "fed-selftraining": "All unlabeled images get new pseudo-labels in each epoch: a baseline of FedIRM's paper.",
    "fedavg-plus": "FedAvg among labeled clients, with residual weights: FedAvg+ of CBAFed's paper.",
    "mt-wfedavg": "Mean teachers, and an average by distance: MT+wFed-Avg of IsoFed's paper.",
}
