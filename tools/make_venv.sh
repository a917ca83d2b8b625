#!/usr/bin/env bash
# make_venv.sh FOLDER: create a virtual environment with a Python that hvkeras supports, preferably 3.11.
# PYTHON selects another one. On Debian and Ubuntu, as root, install the venv module if it is missing.
set -euo pipefail

folder=$1

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do
    if command -v "$name" >/dev/null && supported "$name"; then
      command -v "$name"
      return
    fi
  done
  echo "hvkeras needs Python 3.10 to 3.13. Received: PYTHON=${PYTHON:-}." \
    "HINT: install one (Debian, Ubuntu: apt-get install python3 python3-venv), or set its path: make PYTHON=/path/to/python." >&2
  return 1
}

if [ -x "$folder/bin/python" ] && supported "$folder/bin/python"; then
  exit
fi
python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$(dirname "$0")/system_packages.sh" "python$version-venv"
fi
echo "Making $folder with $("$python" --version)"
rm -rf "$folder"
"$python" -m venv "$folder"
