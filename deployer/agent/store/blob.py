"""Writes one blob into the store.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import Union

from ..host.disk import fail
from ..host.errors import AgentError
from ..host.files import blake2b, put_in_place, remove


class BlobWriter:
    """Writes one blob to a temporary file; `finish` checks and publishes it."""

    def __init__(self, path: str, temporary: str, digest: str, size: int) -> None:
        self._path, self._temporary, self._expected = path, temporary, (digest, size)
        self._hash, self._size = blake2b(digest_size=20), 0
        try:
            self._file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            fail(temporary, error)

    def write(self, data: Union[bytes, memoryview]) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.abort()
            fail(self._temporary, error)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> None:
        """Puts the blob into the store. Raises AgentError of kind usage if its bytes do not have the announced hash."""
        if (self._hash.hexdigest(), self._size) != self._expected:
            self.abort()
            raise not_announced(self._expected[0], self._expected[1], self._size)
        try:
            self._file.close()
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            put_in_place(self._temporary, self._path)
        except OSError as error:
            self.abort()
            fail(self._path, error)

    def abort(self) -> None:
        """Discards the bytes; safe at any time."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk again, for what was still buffered
        remove(self._temporary)


def not_announced(digest: str, size: int, came: int) -> AgentError:
    """The error for a blob whose bytes do not have its hash."""
    return AgentError(
        "usage",
        "%d bytes came that are not the %d bytes announced as %s" % (came, size, digest),
        "a file changed while it was being sent: deploy again",
    )
