"""Models cut over ranks by Megatron-Core: along matrices, layers, positions and experts."""

import warnings

# It regrets, in every process, that kernels for GPUs are not installed. Nothing here needs them.
warnings.filterwarnings("ignore", message="(Transformer Engine|Apex).* not installed", module="megatron")
warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron")
