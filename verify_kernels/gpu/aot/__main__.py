"""Entry point of ``python -m verify_kernels.gpu.aot``."""

from __future__ import annotations

import sys

from verify_kernels.gpu.aot.main import main

if __name__ == "__main__":  # worker processes import this module under another name
    sys.exit(main())
