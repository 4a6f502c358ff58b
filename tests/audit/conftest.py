"""Quiet engines, one thread for torch: the audit's engines are small and many."""

from __future__ import annotations

import torch

from moonstep.audit.quiet import hush

hush()
torch.set_num_threads(1)
