# SPDX-License-Identifier: Apache-2.0
"""What this machine is, what the chosen model will get on it, and what to change: one screen, one line per check.

    python3 -m vllm.expert_offload.doctor [--model FOLDER_OR_NAME] [--cpu-offload-gb N] [...]

Exit code 0: nothing fatal was found (warnings may have been); 1: something that makes serving pointless; 2: the command
line is wrong. Read `cli` for the order of the checks; each is a function `check(machine, asked)` of a file of its own,
and all that lies outside is reached through `machine.Machine`, so tests break a cause and mend it.
"""
