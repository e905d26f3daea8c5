"""Applies the patches and the watchdog to vLLM's engine core if the core and the workers are separate processes.

With one worker, the core runs in the worker's process, which imports `worker.py`. With several workers, as in tensor
parallelism, the core is a separate process that does not import the worker extension. The core does import the
reasoning parser plugin, so this module is configured as that plugin.
"""

from twinkle.sampler.vllm import patches
from twinkle.sampler.vllm.watchdog import exit_with_owner

exit_with_owner()
patches.apply()
