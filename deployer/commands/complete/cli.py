"""The command that prints a shell's completion script."""

from __future__ import annotations

import click

from deployer.commands.options import CONTEXT, Command
from deployer.terminal import say_script

VARIABLE = "_TORCHFERRY_COMPLETE"
"""If this variable is set, the program answers a completion request; the name follows click's scheme."""
LINE = "_TORCHFERRY_LINE"
"""The command line up to the cursor, as it was typed."""
WORD = "_TORCHFERRY_WORD"
"""Only for bash: the last part of the last word, which the answer replaces; `=`, `:` and `@` end such a part."""


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in your shell.

    It completes commands, options, IDs of jobs, hosts, config files and keys. It also does so for ./deploy.py, the same
    program in a checkout. No host is asked. Run the example for your shell once, then open a new shell.

    The script contains the path of this installation. Print it again when that path has changed.

    \b
    Examples:
      deploy.py completion bash >> ~/.bashrc
      deploy.py completion zsh >> ~/.zshrc
      deploy.py completion fish > ~/.config/fish/conf.d/torchferry.fish
    """
    from deployer.commands.complete.scripts import script_of

    say_script(script_of(shell))


COMMANDS = (completion,)
