#!/usr/bin/env bash
# The gate's tests under Python 3.13, which Debian trixie has. `make gate-3.13` calls it.
#
#   requirements/gate_on_trixie.sh UV [PYTEST_ARGUMENTS...]
#
# Debian goes into the folder TRIXIE (.make/trixie), once, by debootstrap; beside it the versions of the locks for that
# Python, without SGLang and torch, which the gate does not start. Needs root. What is mounted is seen by this script
# alone, and is gone when it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${TRIXIE:-.make/trixie}
uv=$1
shift

if [[ ! -e $folder/complete ]]; then
  command -v debootstrap >/dev/null || { echo "gate: debootstrap is not installed" >&2; exit 1; }
  rm -rf "$folder"
  mkdir -p "$folder"
  debootstrap --variant=minbase --include=ca-certificates,git,make,procps,python3 trixie "$folder"
  mkdir "$folder/src" "$folder/packages"
  touch "$folder/complete"
fi

lock=$folder/lock.txt
"$uv" pip compile -q pyproject.toml --extra dev -c sglang_fair/install/cpu.txt -c requirements/dev.txt \
  --override requirements/overrides.txt --python-version 3.13 --python-platform x86_64-manylinux_2_34 \
  --no-annotate --no-header -o "$lock"
get=("$uv" pip install -q --target "$folder/packages" --python-version 3.13 --no-deps)
"${get[@]}" --only-binary :all: -r "$lock"
"${get[@]}" --no-build-isolation .

export folder
unshare --mount bash -euo pipefail -c '
  mount --bind . "$folder/src"
  mount -t proc proc "$folder/proc"
  mount --rbind /dev "$folder/dev"
  mount --rbind /sys "$folder/sys"
  mount -t tmpfs tmpfs "$folder/tmp"
  cp /etc/hosts /etc/resolv.conf "$folder/etc/"
  exec chroot "$folder" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/packages/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/src:/packages PYTHONDONTWRITEBYTECODE= GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory \
    GIT_CONFIG_VALUE_0="*" bash -c "cd /src && exec python3 -m pytest -p no:cacheprovider \"\$@\"" gate "$@"
' gate "$@"
