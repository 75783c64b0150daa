"""The one error of this package: something about the data that its owner can put right."""

from __future__ import annotations


class DataError(Exception):
    """Data that cannot be trained on: what is wrong with which value, where it was seen, and what to do."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  in {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)
