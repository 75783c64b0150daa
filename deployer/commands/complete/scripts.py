"""The completion script for each shell. It calls only this installation: pressing TAB after the name of another
`deploy.py` does not run that program.

An answer consists of lines with a kind, a word and a help text. `plain`: a blank follows the word; `open`: no blank,
because the word continues; `file`, `dir`: the shell completes these itself.
"""

from __future__ import annotations

import shlex
import sys

from deployer.commands.complete.cli import LINE, VARIABLE, WORD
from deployer.paths import CLIENT_ROOT

_BASH = """\
_torchferry_completion() {
    local answer line
    COMPREPLY=()
    if [[ ${1##*/} == deploy.py && ! ${1/#\\~/$HOME} -ef @DEPLOY@ ]]; then
        compopt -o default 2>/dev/null
        return
    fi
    answer=$(@LINE@="${COMP_LINE:0:COMP_POINT}" @WORD@="${COMP_WORDS[COMP_CWORD]}" \\
        @VARIABLE@=bash_complete @PROGRAM@ 2>/dev/null)
    while IFS= read -r line; do
        case $line in
            file,*) compopt -o default 2>/dev/null ;;
            dir,*) compopt -o dirnames 2>/dev/null ;;
            open,*) compopt -o nospace 2>/dev/null; COMPREPLY+=("${line#*,}") ;;
            plain,*) COMPREPLY+=("${line#*,}") ;;
        esac
    done <<< "$answer"
}
complete -o nosort -F _torchferry_completion torchferry deploy.py 2>/dev/null ||
    complete -F _torchferry_completion torchferry deploy.py  # bash of macOS, which has no compopt either
"""

_ZSH = """\
#compdef torchferry deploy.py
_torchferry_completion() {
    local line kind word
    local -a answer plain open
    if [[ ${words[1]:t} == deploy.py && ! ${~words[1]} -ef @DEPLOY@ ]]; then
        _files
        return
    fi
    answer=("${(@f)$(@LINE@="${(j: :)words[1,CURRENT-1]} $PREFIX" @VARIABLE@=zsh_complete @PROGRAM@ 2>/dev/null)}")
    for line in $answer; do
        kind=${line%%,*} word=${line#*,}
        case $kind in
            file) compset -P '*='; _files ;;
            dir) compset -P '*='; _files -/ ;;
            open) open+=("$word") ;;
            plain) plain+=("$word") ;;
        esac
    done
    (( $#plain )) && _describe -V words plain
    (( $#open )) && _describe -V more open -S ''
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _torchferry_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
    compdef _torchferry_completion torchferry deploy.py
fi
"""

_FISH = """\
function __torchferry_completion
    set -l typed (commandline -ct | string collect --allow-empty)
    set -l before (string replace -r '[^=]*$' '' -- "$typed")
    set -l path (string replace -r '^.*=' '' -- "$typed")
    set -l command (commandline -opc)[1]
    if string match -qr '(^|/)deploy\\.py$' -- $command; and test (realpath -- $command) != @DEPLOY@
        __fish_complete_path "$typed"
        return
    end
    set -l line (commandline -cp | string collect)
    for item in (env @LINE@=$line @VARIABLE@=fish_complete @PROGRAM@ 2>/dev/null)
        set -l kind (string replace -r ',.*' '' -- $item)
        switch $kind
            case file
                for found in (__fish_complete_path "$path")
                    echo "$before$found"
                end
            case dir
                for found in (__fish_complete_directories "$path" '')
                    echo "$before$found"
                end
            case '*'
                string replace -r '^[a-z]+,' '' -- $item
        end
    end
end
complete -k -f -c torchferry -a '(__torchferry_completion)'
complete -k -f -c deploy.py -a '(__torchferry_completion)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script_of(shell: str) -> str:
    """The completion script that a shell reads when it starts."""
    quote = _fish_word if shell == "fish" else shlex.quote
    deploy = quote(str((CLIENT_ROOT / "deploy.py").resolve()))
    names = {"LINE": LINE, "WORD": WORD, "VARIABLE": VARIABLE, "DEPLOY": deploy}
    script = SCRIPTS[shell].replace("@PROGRAM@", f"{quote(sys.executable or 'python3')} {deploy}")
    for name, value in names.items():
        script = script.replace(f"@{name}@", value)
    return script.rstrip("\n")


def _fish_word(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
