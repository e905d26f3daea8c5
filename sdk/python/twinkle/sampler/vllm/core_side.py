"""Applies the patches and the watchdog to vLLM's engine core if it runs in another process than the workers.

With one worker, the core runs in the worker's process, which imports `worker.py`. With several workers, as in tensor
parallelism, the core is a separate process that does not import the worker extension. It imports the module that is
configured as the reasoning parser plugin, which is this module.
"""

from twinkle.sampler.vllm import patches
from twinkle.sampler.vllm.watchdog import exit_with_owner

exit_with_owner()
patches.apply()
