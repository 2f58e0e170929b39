"""An SGLang environment for machines without a GPU: `install.sh` makes it, `quintain_sglang_cpu.py` runs inside it."""
