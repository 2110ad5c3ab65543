"""The store of a run: one JSON line a question, in Spec-Bench's answer format.

It survives a kill at any point.

After each question or batch, the drafter's state is written first, then the answers' lines, flushed
to the disk. So the state after the last line is always there, and a resumed run continues from
exactly that state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import lock_descriptor

from model.errors import UserError
from model.files import PARTIAL, load_state, save_state, write_json

from .rows import Row, check_schema, difference, read_answers, read_object
from .runs import without_paths


class AnswerStore:
    """The files of one run in its directory.

    Args:
        folder: holds answers.jsonl (or the file named), metadata.json, summary.json and the state.
        answers: another place for the answers file, as `--answer-file` asks for.
    """

    def __init__(self, folder: Path, answers: Path | None = None) -> None:
        self.folder = folder
        self.answers = answers or folder / "answers.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one process. Raises UserError if another one is at work in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "run.lock").open("a") as handle:
            if not lock_descriptor(handle.fileno(), blocking=False):
                raise UserError(
                    f"{self.folder}: another run is at work in this directory;"
                    " wait for it or stop it"
                )
            yield

    def begin(self, metadata: dict[str, Any]) -> dict[Any, Row]:
        """Start or resume a run, and return the stored answers.

        Write the metadata, and cut off an unfinished line or batch.

        Args:
            metadata: `settings` decide what is answered, `circumstances` how fast; `questions`: how
                many there are.

        Raises:
            UserError: the directory holds a run of another configuration, or one begun under other
                circumstances; nothing is changed then.
        """
        path = self.folder / "metadata.json"
        data = self.answers.read_bytes() if self.answers.exists() else b""
        answered = data.count(b"\n")
        # killed while a batch was written: it is answered again
        if answered < metadata["questions"]:
            answered -= answered % metadata["settings"].get("batch", 1)
        recorded = read_object(path)
        if recorded:
            self._check(recorded, metadata, answered)
        elif data:
            raise UserError(
                f"{self.answers} holds answers of an unknown configuration"
                " (no metadata.json next to it); move it away"
            )

        if not answered:  # no answer depends on earlier metadata
            write_json(path, metadata)
        elif "config" in recorded and recorded["config"]["method"] != metadata["config"]["method"]:
            # They differ in settings that decide no answer, as a server's type: the last command's
            # count.
            recorded["config"]["method"] = metadata["config"]["method"]
            write_json(path, recorded)

        states = set(self.folder.glob("state-*.safetensors")) - {self._state_path(answered)}
        # a killed run's; the directory is locked
        for stale in [*self.folder.glob(PARTIAL), *states]:
            stale.unlink()

        if not data:
            return {}
        complete = sum(len(line) + 1 for line in data.split(b"\n")[:answered])
        if complete < len(data):
            os.truncate(self.answers, complete)
        rows, damage = read_answers(self.answers)
        if damage:
            raise UserError(
                f"{self.answers}: {damage};"
                " this file was changed from outside, delete the directory to start anew"
            )

        return rows

    def _check(self, recorded: dict[str, Any], metadata: dict[str, Any], answered: int) -> None:
        """Raise UserError if the recorded run is not the one of this metadata."""
        check_schema(recorded["settings"], self.folder)
        before = without_paths(recorded["settings"])
        different = difference(before, without_paths(metadata["settings"]))
        if different:
            raise UserError(
                f"{self.folder} holds a run of another configuration: {different};"
                " use another run_dir or delete it"
            )
        if answered and not self.is_finished():
            different = difference(recorded["circumstances"], metadata["circumstances"])
            if different:
                raise UserError(
                    f"{self.folder} holds {answered} answers given under other circumstances:"
                    f" {different}; finish it under those, or delete it to start anew"
                )

    def is_finished(self) -> bool:
        """Return whether the run's summary is there.

        It is the last file of a run whose questions are all answered.
        """
        return (self.folder / "summary.json").exists()

    def state_at(self, answered: int) -> dict[str, torch.Tensor]:
        """Load the drafter's state after `answered` questions. Raises UserError if it is gone.

        After the last question, a kill may have come before or after the file was renamed.
        """
        path = self._state_path(answered)
        return load_state(path if path.exists() else self.folder / "state.safetensors")

    def append(self, rows: Sequence[Row], state: dict[str, torch.Tensor], answered: int) -> None:
        """Write the state after answer number `answered` (from 1).

        Then write the answers up to it.
        """
        if state:
            save_state(state, self._state_path(answered))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        self.answers.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.answers.open("ab") as handle:
                handle.write(lines)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:  # a part that was written is cut off by `begin`
            raise UserError(
                f"{self.answers}: cannot be written ({error.strerror}); {answered - len(rows)}"
                " answers are kept, make room and give the same command again"
            ) from None

        if state:
            self._state_path(answered - len(rows)).unlink(missing_ok=True)

    def finish(
        self, summary: dict[str, Any], state: dict[str, torch.Tensor], answered: int
    ) -> None:
        """Write the summary.

        The last state stays as `state.safetensors`, to start another run from.
        """
        if state and self._state_path(answered).exists():
            self._state_path(answered).replace(self.folder / "state.safetensors")
        write_json(self.folder / "summary.json", summary)

    def _state_path(self, answered: int) -> Path:
        return self.folder / f"state-{answered}.safetensors"
