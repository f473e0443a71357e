"""`accel-run completion SHELL`: print the shell completion script."""

from __future__ import annotations

HELP = """usage: accel-run completion bash|zsh|fish

Prints a shell completion script for commands, options, keys, values and run names. To install it:

  bash   echo 'source <(accel-run completion bash)' >> ~/.bashrc
  zsh    echo 'source <(accel-run completion zsh)' >> ~/.zshrc        (after the line with compinit)
  fish   accel-run completion fish > ~/.config/fish/completions/accel-run.fish
"""

# readline splits words at = and :, and replaces only the last piece. So the script joins the pieces to complete the
# whole word, and removes the pieces before the last one from each result.
BASH = """\
_accel_run() {
    local -a words=()
    local word last="" prefix current=${COMP_WORDS[COMP_CWORD]}
    local glued=""
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ $word && ${#words[@]} -gt 0 && ($glued || $word == [=:]*) ]]; then
            words[${#words[@]}-1]=$last$word
            last+=$word
        else
            words+=("$word")
            last=$word
        fi
        if [[ $word == *[=:] ]]; then glued=1; else glued=""; fi
    done
    if [[ $current == [=:]* ]]; then prefix=$last; else prefix=${last%"$current"}; fi
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$prefix"}")
    done < <("$1" complete -- "${words[@]}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _accel_run accel-run
"""

ZSH = """\
#compdef accel-run
_accel_run() {
    local -a found
    found=(${(f)"$(${(Q)words[1]} complete -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
    (( $#found )) || _files
}
if [[ $funcstack[1] == _accel_run ]]; then _accel_run "$@"; else compdef _accel_run accel-run; fi
"""

# fish itself adds no space after = and .
FISH = """\
function __accel_run_complete
    set -l before (commandline -opc)
    set -l program $before[1]
    set -e before[1]
    set -l current (commandline -ct)
    $program complete -- $before "$current" 2>/dev/null
end
complete -c accel-run -a '(__accel_run_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(argv: list[str]) -> int:
    """Print the script of one shell."""
    from runner.base.errors import ConfigError, Problem
    from runner.config.schema import did_you_mean

    if len(argv) != 1:
        raise ConfigError(Problem("needs one shell name", "completion", "use accel-run completion bash, zsh or fish"))
    if argv[0] not in SCRIPTS:
        fix = did_you_mean(argv[0], SCRIPTS) or "use accel-run completion bash, zsh or fish"
        raise ConfigError(Problem("unknown shell", argv[0], fix))
    print(SCRIPTS[argv[0]], end="")
    return 0
