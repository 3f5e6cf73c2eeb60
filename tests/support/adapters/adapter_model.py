"""What an adapter must look like after the changes that were made to it, worked out without a database."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

Outcome = int | str | None  # what a call returned, or the name of its refusal


@dataclass
class ModelOfAdapter:
    """One adapter. It is changed as one worker's journal says; a deleted one may be purged by anybody at any time."""

    last_number: int = 0
    revisions: dict[int, str] = field(default_factory=dict)  # number -> content
    # alias -> its moves, each (to, the place of the move that a rollback goes back to)
    moves: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    exists: bool = False
    is_deleted: bool = False
    may_be_purged: bool = False

    @property
    def view(self) -> tuple[dict[int, str], dict[str, int]] | None:
        """(revisions, aliases), or None where it is unknown."""
        if not self.exists or self.is_deleted:
            return None
        return self.revisions, {alias: moves[-1][0] for alias, moves in self.moves.items()}

    def after(self, change: dict[str, Any]) -> list[tuple[ModelOfAdapter, Outcome]]:
        """What it can be after a change that was made, with what the call returns then. Empty: it must be refused."""
        made = copy.deepcopy(self)
        match change["change"]:
            case "import":
                return made._imported(change["content"], change["moves_latest"])
            case "alias" if self.view is not None and change["number"] in self.revisions:
                made._move(change["alias"], change["number"])
                return [(made, change["number"])]
            case "rollback" if self.view is not None and change["alias"] in self.moves:
                return made._rolled_back(change["alias"])
            case "delete" if self.view is not None:
                made.is_deleted = made.may_be_purged = True
                return [(made, None)]
            case "restore" if self.exists:
                made.is_deleted = made.may_be_purged = False
                return [(made, None)]
        return []

    def after_refusal(self, change: dict[str, Any], refusal: str) -> ModelOfAdapter | None:
        """What it is after a change that was refused; None where this refusal is wrong."""
        made = copy.deepcopy(self)
        match change["change"], refusal:
            case "import", "RevisionBeingRemoved":
                return made
            case "import", "CatalogConflict" if self.is_deleted:
                return made
            case "rollback", "CatalogConflict" if self.view is not None and not self._rolled_back_copy(change["alias"]):
                return made
            case "restore", "AdapterNotFound" if not self.exists or self.may_be_purged:
                made._purge()
                return made
            case (("alias" | "delete"), "AdapterNotFound") if self.view is None:
                return made
            case "rollback", "AdapterNotFound" if self.view is None or change["alias"] not in self.moves:
                return made
        return None

    def _imported(self, content: str, moves_latest: bool) -> list[tuple[ModelOfAdapter, Outcome]]:
        if self.is_deleted:  # then it has been purged, or it would have been refused
            self._purge()
        self.exists = True
        number = next((number for number, each in self.revisions.items() if each == content), None)
        if number is None:
            self.last_number = number = self.last_number + 1
            self.revisions[number] = content
        if moves_latest or "latest" not in self.moves:
            self._move("latest", number)
        return [(self, number)]

    def _move(self, alias: str, number: int) -> None:
        moves = self.moves.setdefault(alias, [])
        if not moves or moves[-1][0] != number:
            moves.append((number, len(moves) - 1 if moves else None))

    def _rolled_back(self, alias: str) -> list[tuple[ModelOfAdapter, Outcome]]:
        moves = self.moves[alias]
        before = moves[-1][1]
        if before is None:
            return []
        moves.append(moves[before])
        return [(self, moves[-1][0])]

    def _rolled_back_copy(self, alias: str) -> list[tuple[ModelOfAdapter, Outcome]]:
        return copy.deepcopy(self)._rolled_back(alias) if alias in self.moves else [(self, None)]

    def _purge(self) -> None:
        self.revisions, self.moves = {}, {}
        self.exists = self.is_deleted = self.may_be_purged = False
