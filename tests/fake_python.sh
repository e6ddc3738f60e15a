#!/bin/sh
# A stand-in for a Python interpreter in tests of the set-up. It logs how it was called and fails on demand:
#   FAKE_LOG         file that gets one line a call
#   FAKE_PACKAGES    JSON that "which packages are there" answers
#   FAKE_PIP_ERROR   pip install prints this and fails; FAKE_PIP_ERROR_ON limits it to calls that contain a word
#   FAKE_PIP_SLEEP   pip install takes so long
#   FAKE_VENV_ERROR  making a virtual environment prints this and fails
echo "$*" | head -1 >> "$FAKE_LOG"
case "$1 $2" in
    "-m venv")
        if [ -n "$FAKE_VENV_ERROR" ]; then echo "$FAKE_VENV_ERROR" >&2; exit 1; fi
        for folder; do :; done
        mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && echo "home = here" > "$folder/pyvenv.cfg" ;;
    "-m pip")
        [ "$3" = install ] || exit 0
        sleep "${FAKE_PIP_SLEEP:-0}"
        case "$*" in
            *"$FAKE_PIP_ERROR_ON"*) if [ -n "$FAKE_PIP_ERROR" ]; then echo "$FAKE_PIP_ERROR" >&2; exit 1; fi ;;
        esac ;;
    *) echo "${FAKE_PACKAGES:-[]}" ;;
esac
