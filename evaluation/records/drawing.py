"""How a run's tokens were drawn, as its records hold it: what is not plain greedy decoding's."""

from __future__ import annotations

from typing import Any

# The settings of sampling, by the names of their columns: a method may have a top_k of its own.
COLUMNS = {
    "temperature": "temperature",
    **{key: f"sampling_{key}" for key in ("top_k", "top_p", "min_p")},
    "repetition_penalty": "repetition_penalty",
}


def drawing(settings: dict[str, Any]) -> dict[str, Any]:
    """By column what is not greedy decoding's, and the temperature in any case; runs of before sampling have 0."""
    return {COLUMNS["temperature"]: 0.0} | {COLUMNS[key]: v for key, v in settings.get("sampling", {}).items()}


def in_words(settings: dict[str, Any]) -> str:
    """For above a table: greedy, or temperature 0.7, top_p 0.9."""
    own: dict[str, Any] = settings.get("sampling", {})
    words = [] if own.get("temperature") else ["greedy"]
    return ", ".join(words + [f"{key} {value}" for key, value in own.items()])
