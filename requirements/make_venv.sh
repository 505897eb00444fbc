#!/bin/sh
# Makes a virtual environment with the newest Python that works, 3.13 or 3.12, or of one of these, or with the one named:
#
#   requirements/make_venv.sh .venv [3.12 | /path/to/python]
#
# Looks on PATH, then at what pyenv and uv have installed; of two 3.13 it takes the first. An environment that exists
# is kept; naming another Python than it has is an error. megatron-core is for 3.12 and later, without a wheel for 3.14.
set -eu

venv=$1
shift
NEWLINE='
'
# Python 2 may run this, too. The modules are those that torch, datasets and vLLM import: a Python
# built where a library of the system was missing lacks some, and Debian packages ensurepip apart.
EXAMINATION='
import platform, sys, sysconfig
version = platform.python_version()
kind = (platform.python_implementation(), platform.system(), platform.machine())
if kind != ("CPython", "Linux", "x86_64"):
    sys.exit("%s on %s %s" % kind)
if sys.version_info[:2] not in ((3, 13), (3, 12)):
    sys.exit("Python " + version)
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("Python %s without the GIL" % version)
for module in ("bz2", "ctypes", "ensurepip", "lzma", "sqlite3", "ssl", "venv"):
    try:
        __import__(module)
    except ImportError:
        sys.exit("Python %s without its module %s" % (version, module))
print(version)
'

fail() {
    printf 'make setup: %s\n' "$1" >&2
    exit 1
}

# Sets `answer` to the version of the Python "$1" if it works; else fails, and says there what is wrong.
examine() {
    if answer=$("$1" -c "$EXAMINATION" 2>&1 </dev/null); then
        answer=${answer##*"$NEWLINE"} # what comes before are warnings
    else
        answer=${answer%%"$NEWLINE"*}
        return 1
    fi
}

# Prints every place where a Python may be; of equals, the first counts.
places() (
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
    IFS=:
    for folder in $PATH; do
        for name in python3.13 python3.12 python3 python; do
            echo "$folder/$name"
        done
    done
    for python in "$pyenv"/*/bin/python3 "$uv"/*/bin/python3; do
        echo "$python"
    done
)

# Sets `python` to the newest that works, and `version` to its version; of a "$1" such as 3.12 alone, if given.
find_newest() {
    newest=0 refused=""
    while read -r place && [ "$newest" -lt 13 ]; do
        if [ ! -f "$place" ] || [ ! -x "$place" ]; then
            continue
        elif examine "$place"; then
            minor=${answer#3.}
            minor=${minor%%.*}
            if [ "$minor" -gt "$newest" ] && [ "${1:-3.$minor}" = "3.$minor" ]; then
                python=$place version=$answer newest=$minor
            fi
        else
            refused="$refused$NEWLINE  $place: $answer"
        fi
    done <<PLACES
$(places)
PLACES
    [ -n "$python" ] || fail "found no Python ${1:-3.13 or 3.12} that works on PATH, in pyenv or in uv.
Get one by \`uv python install ${1:-3.13}\`, \`pyenv install ${1:-3.13}\` or, on Debian 13 and Ubuntu 24.04, \`apt install \
python3 python3-venv\`. Or name one that is elsewhere: make PYTHON=/path/to/python3.${refused:+${NEWLINE}Looked at:$refused}"
}

have=""
if [ -e "$venv/bin/pip" ]; then
    examine "$venv/bin/python" || fail "$venv does not work ($answer): remove it (rm -r $venv)"
    have=$answer
else
    for content in "$venv"/*; do
        [ ! -e "$content" ] ||
            fail "$venv is not empty, and no environment with pip: remove it (rm -r $venv), or name another (VENV=...)"
    done
fi
python=""
case ${1:-} in
"")
    if [ -n "$have" ]; then
        echo "$venv keeps Python $have; to have the newest that works, remove it (rm -r $venv)"
        exit
    fi
    find_newest
    why="the newest that works"
    ;;
3.12 | 3.13)
    [ "${have%.*}" != "$1" ] || exit 0
    find_newest "$1"
    why="the newest $1 that works"
    ;;
3.[0-9] | 3.[0-9][0-9]) fail "PYTHON=$1 is neither 3.12 nor 3.13" ;;
*)
    examine "$1" || fail "PYTHON=$1 does not work: $answer"
    python=$1 version=$answer why="named by PYTHON"
    ;;
esac
if [ -n "$have" ]; then
    [ "$version" = "$have" ] || fail "$venv has Python $have, but PYTHON=$1 is $version: leave PYTHON out, or \
remove $venv (rm -r $venv)"
    exit
fi
echo "making $venv with Python $version, $why: $python"
"$python" -m venv "$venv"
