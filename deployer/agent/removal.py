"""Files and folders that shall be gone: what cannot be removed stays, and is no error.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os


def remove(path: str) -> None:
    """The file is gone afterwards, or cannot be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_folder(folder: str) -> None:
    """As much of it as can be removed, read-only folders too; of a link the link alone."""
    import shutil  # nine modules that a supervisor, which removes single files alone, starts without

    if os.path.islink(folder) or not os.path.isdir(folder):
        remove(folder)
        return
    _let_in(folder)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            _let_in(os.path.join(path, name))
    shutil.rmtree(folder, ignore_errors=True)


def _let_in(folder: str) -> None:
    """Lets the user list and change a folder that is theirs; what a link leads to is left as it is."""
    try:
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
    except OSError:
        pass
