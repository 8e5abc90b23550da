# SPDX-License-Identifier: Apache-2.0
"""python3 -m vllm.expert_offload.doctor"""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
