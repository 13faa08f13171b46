"""Room of the communication kernels: peer memory, all-reduce, expert dispatch and combine. Imports nothing of llmserve.

Empty until its issue is taken: every worker of today is one rank.
"""
