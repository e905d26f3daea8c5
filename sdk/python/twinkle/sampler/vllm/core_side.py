"""Our side of vLLM's engine core, where that is another process than its workers.

With one worker the core is the worker's process, which loads `worker.py`. With several, as tensor parallelism has,
the core schedules, clears memory and follows forms in a process of its own that loads no extension of workers; it
imports the plugin for parsers of reasoning, and so this.
"""

from twinkle.sampler.vllm import patches
from twinkle.sampler.vllm.watchdog import end_with_owner

end_with_owner()
patches.apply()
