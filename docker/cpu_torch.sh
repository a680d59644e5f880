#!/bin/sh
# sh cpu_torch.sh PIP...: installs, by this pip, the build of torch for CPUs that constraints.txt names.
#
# What pip takes by itself on Linux is the build for CUDA, of gigabytes. The one for CPUs is named 2.13.0+cpu: pip's own
# index is asked first, since many mirrors have it; then, for torch alone, the index of torch's makers or TORCH_INDEX_URL.
# What pip installs afterwards (torch>=2.9) is content with it, and brings what it needs. A torch of this version that is
# there is left as it is, whatever its build.
set -eu
exec 3>&1
wanted="$(grep '^torch==' constraints.txt)"
[ "$(uname -s)" = Linux ] || exit 0 # elsewhere there is no build for CUDA
if "$@" show torch 2>/dev/null | grep -q "^Version: ${wanted#torch==}\(+.*\)\{0,1\}\$"; then exit 0; fi
problem="$("$@" install --no-deps "$wanted+cpu" 2>&1 >&3)" && exit 0
index="${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
echo "$wanted+cpu is not at pip's own index: taking it from $index"
"$@" install --no-deps --index-url "$index" "$wanted+cpu" || {
  echo "sluice: torch for CPUs is not to be had. Name an index that has $wanted+cpu by TORCH_INDEX_URL," \
    "or a folder that has its wheel by PIP_FIND_LINKS. pip's own index:" >&2
  echo "$problem" >&2
  exit 1
}
