"""What to know about a run's data before its first round, in sentences for people and in numbers for reports."""

from typing import Any

from fewlabel.engine.world import World


def notes_of(world: World) -> dict[str, Any]:
    """Return the notes on a run that is laid out."""
    return {"sentences": [*world.dataset.notes]}
