#!/usr/bin/env bash
# install.sh FOLDER [PYTHON]: an environment in which SGLang serves from a CPU. About 1.6 GB, a minute or two; once.
#
# An environment of its own, because SGLang and the trainer ask for different versions of torch and transformers. On a
# machine with a GPU none of this is needed: there, `pip install sglang` in a fresh environment is all.
# Done already (same versions, same files): nothing happens. FOLDER/bin/python is what engine.launch.python names.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER [PYTHON]}
base_python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
torch=torch==2.13.0+cpu
torch_index=https://download.pytorch.org/whl/cpu
stamp=$folder/.quintain
wanted=$(cat "$here/install.sh" "$here/quintain_sglang_cpu.py" "$here/requirements.txt" "$here/requirements-alone.txt" | sha256sum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "installing SGLang for CPUs into $folder (about 1.6 GB, a minute or two)"
rm -f "$stamp"
[ -x "$folder/bin/python" ] || "$base_python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)

# First, so that nothing else brings a CUDA build. The sources that pip is set up with are tried before the index.
"${pip[@]}" "$torch" 2>/dev/null || "${pip[@]}" --index-url "$torch_index" "$torch"
"${pip[@]}" --no-deps -r "$here/requirements-alone.txt"
# pip then notes that the packages above ask for others that are absent: that is meant.
"${pip[@]}" -r "$here/requirements.txt" 2> >(grep -vE "requires|dependency resolver|is ignored" >&2)

site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/quintain_sglang_cpu.py" "$site/"
echo 'import quintain_sglang_cpu' > "$site/quintain_sglang_cpu.pth"

# Proof before the stamp: everything that a server imports is there.
SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 "$folder/bin/python" -W ignore -c '
import sglang.srt.entrypoints.http_server
import sglang, torch, transformers
print(f"sglang {sglang.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")'
echo "$wanted" > "$stamp"
