#!/usr/bin/env bash
# system_packages.sh PACKAGE...: install Debian packages as root; otherwise print the command.
set -euo pipefail

if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "This machine lacks system packages. Received: missing=$*." \
    "HINT: install them (Debian, Ubuntu: sudo apt-get install $*), then run make again." >&2
  exit 1
fi
echo "Installing $*"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends -y "$@" >/dev/null
