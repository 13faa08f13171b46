"""One engine process: worker, scheduler, pages, prefix cache, model runner, sampler, and its side of the hand-off."""

import os

# Weights in huge pages: streaming them costs fewer TLB misses (5% of the demo's tokens per second on a CPU). PyTorch
# reads this at its first allocation, so it is set before anything of this package imports torch.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
