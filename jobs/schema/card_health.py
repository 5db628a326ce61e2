"""Quantities that a preflight reads and measures of a card; `orchestrator.judge.fleet` judges it."""

from jobs.schema.quantities import Better, Quantity, Role

GPU_COUNT = Quantity("gpu_count", "1", "GPUs of the node")
POWER_LIMIT = Quantity("power_limit", "W", "Power limit")
POWER_DEFAULT = Quantity("power_default", "W", "Power limit by default")
ECC_ERRORS = Quantity("ecc_errors", "1", "Uncorrected ECC errors since the last reset", better=Better.LOWER)
ECC_ERRORS_EVER = Quantity("ecc_errors_ever", "1", "Uncorrected ECC errors of the card's life", better=Better.LOWER)
REMAPPED_ROWS = Quantity("remapped_rows", "1", "Rows of memory that were replaced by spare ones", better=Better.LOWER)
REMAP_PENDING = Quantity("remap_pending", "1", "Whether a row is replaced at the next reset", better=Better.LOWER)
REMAP_FAILED = Quantity("remap_failed", "1", "Whether a row could not be replaced", better=Better.LOWER)
XIDS = Quantity("xids", "1", "Xid errors in the kernel's log that blame the card", better=Better.LOWER)
NVLINKS = Quantity("nvlinks", "1", "NVLinks that are up", better=Better.HIGHER)
PCIE_WIDTH = Quantity("pcie_width", "1", "PCIe lanes in use", better=Better.HIGHER)
PCIE_WIDTH_MAX = Quantity("pcie_width_max", "1", "PCIe lanes that card and slot have")
PCIE_GENERATION = Quantity("pcie_generation", "1", "PCIe generation under load", better=Better.HIGHER)
PCIE_GENERATION_MAX = Quantity("pcie_generation_max", "1", "PCIe generation that card and slot have")
LOAD_CLOCK = Quantity("load_clock", "MHz", "SM clock under load", better=Better.HIGHER)
GEMM_RATE = Quantity("gemm_rate", "TFLOP/s", "Matrix products", "GEMM", Better.HIGHER, Role.HEADLINE)
COPY_RATE = Quantity("copy_rate", "GB/s", "Memory read and written by a copy", "copy", Better.HIGHER, Role.HEADLINE)
HOST_COPY_RATE = Quantity(
    "host_copy_rate", "GB/s", "Copy from pinned host memory", "copy from host", Better.HIGHER, Role.HEADLINE
)

CARD_HEALTH = (
    *(GEMM_RATE, COPY_RATE, HOST_COPY_RATE, LOAD_CLOCK, PCIE_WIDTH, PCIE_GENERATION),
    *(GPU_COUNT, POWER_LIMIT, POWER_DEFAULT, ECC_ERRORS, ECC_ERRORS_EVER, REMAPPED_ROWS, REMAP_PENDING, REMAP_FAILED),
    *(XIDS, NVLINKS, PCIE_WIDTH_MAX, PCIE_GENERATION_MAX),
)
