"""Compiles what executors will call, into the cache. Runs at set-up and when an image is built.

python -m frazil.native.warm_up
"""

from __future__ import annotations

from frazil.native.compiler import folders, warm_up

if __name__ == "__main__":
    warm_up()
    print(*(folder for folder in folders() if folder.is_dir()), sep="\n")
