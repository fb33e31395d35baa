"""What one rank of a known machine can do; every number says where it is from.

Presets are a place to start. A profile of the real machine replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flexcp.core.errors import UnknownNameError

Kind = Literal["measured", "published", "derived", "assumed"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where some numbers of a machine are from.

    Attributes:
        numbers: fields of `Hardware`, separated by spaces.
        kind: `measured`; `published` by the maker or in a paper; `derived` from either by a stated factor;
            `assumed` where nothing better is known.
        source: which measurement, sheet, paper or factor.
    """

    numbers: str
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank and the links around it.

    Attributes:
        flops_per_s: peak dense rate in the training precision.
        matmul_efficiency, attention_efficiency: share of the peak that training reaches.
        memory_bytes: device memory of one rank.
        intra_bytes_per_s, intra_latency_s: one direction between neighbours of a node; per ring step.
        inter_bytes_per_s, inter_latency_s: the same across nodes, per rank.
        pack_overhead_s: per layer, what a pack costs however small it is (launches, host work).
        ring_step_overhead_s: per layer and pass, the work that one more ring step adds (launches, merging).
        sample_overhead_s: per layer, what one more sample in a pack costs beyond its tokens and pairs.
        element_bytes: bytes of a weight or activation in the training precision.
        origins: where every number is from.
        token_scale: measured over counted bytes of a token; 1 where nobody measured.
    """

    name: str
    flops_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_bytes: int
    intra_bytes_per_s: float
    intra_latency_s: float
    inter_bytes_per_s: float
    inter_latency_s: float
    pack_overhead_s: float
    ring_step_overhead_s: float
    sample_overhead_s: float
    element_bytes: int
    origins: tuple[Origin, ...]
    token_scale: float = 1.0

    @property
    def origin(self) -> str:
        """How many of its numbers are of which kind.

        >>> hardware("h100").origin
        '2 measured, 3 published, 2 derived, 5 assumed'
        """
        counts = dict.fromkeys(KINDS, 0)
        for origin in self.origins:
            counts[origin.kind] += len(origin.numbers.split())
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)

    def described(self) -> list[str]:
        """Every number with its value and origin, a line for each origin.

        >>> hardware("h200").described()[2]
        'published: memory_bytes 1.41e+11 (NVIDIA H200 SXM data sheet: 141 GB.)'
        """
        return [
            f"{origin.kind}: "
            + ", ".join(f"{number} {getattr(self, number):.3g}" for number in origin.numbers.split())
            + f" ({origin.source})"
            for origin in self.origins
        ]

    def cell(self, tensor: int, pipeline: int) -> Hardware:
        """A TP x PP cell as one rank: what its devices compute, hold and send together.

        1F1B: the first stage has as many micro-batches under way as there are stages, of its own layers, so a
        token takes the room of all layers on the devices of one stage. Not in it: messages of tensor
        parallelism, and the fill of the pipeline.

        >>> cell = hardware("h100").cell(tensor=2, pipeline=4)
        >>> cell.memory_bytes // hardware("h100").memory_bytes, cell.token_scale
        (8, 4.0)
        """
        devices = tensor * pipeline
        return replace(
            self,
            name=self.name if devices == 1 else f"{self.name}, TP {tensor} x PP {pipeline}",
            flops_per_s=self.flops_per_s * devices,
            memory_bytes=self.memory_bytes * devices,
            intra_bytes_per_s=self.intra_bytes_per_s * devices,
            inter_bytes_per_s=self.inter_bytes_per_s * devices,
            intra_latency_s=self.intra_latency_s / pipeline,
            inter_latency_s=self.inter_latency_s / pipeline,
            # Each stage launches its own layers, each of its devices all of them.
            pack_overhead_s=self.pack_overhead_s / pipeline,
            ring_step_overhead_s=self.ring_step_overhead_s / pipeline,
            sample_overhead_s=self.sample_overhead_s / pipeline,
            token_scale=self.token_scale * pipeline,
        )


_LATENCIES = "matmul_efficiency ring_step_overhead_s intra_latency_s inter_latency_s"
_DISTCA = (
    Origin(
        "attention_efficiency",
        "measured",
        "H100, hao-ai-lab/DistCA (Apache-2.0), forward times by length, 64 heads x 128: 341 TFLOP/s at 64k "
        "tokens = 0.35 of peak; backward assumed alike.",
    ),
    Origin(
        "intra_bytes_per_s",
        "measured",
        "H100, DistCA: its 8-GPU reduce-scatter reaches 0.28e12 bytes/s on the bus.",
    ),
    Origin(
        "sample_overhead_s pack_overhead_s",
        "derived",
        "H100, DistCA: pairs alone fit 166 packed batches to 0.5 %, which leaves 5 us a sample and layer for "
        "partly filled tiles; one short document takes 25-28 us a layer, times four such floors of launches.",
    ),
)
_BF16 = Origin("element_bytes", "assumed", "Training in bf16.")
_CUSTOMARY = Origin(_LATENCIES, "assumed", "Customary values; nobody measured them for FlexCP.")

_H100 = Hardware(
    name="h100",
    flops_per_s=989e12,
    matmul_efficiency=0.55,
    attention_efficiency=0.35,
    memory_bytes=80 * 10**9,
    intra_bytes_per_s=280e9,
    intra_latency_s=10e-6,
    inter_bytes_per_s=50e9,
    inter_latency_s=20e-6,
    pack_overhead_s=100e-6,
    ring_step_overhead_s=15e-6,
    sample_overhead_s=5e-6,
    element_bytes=2,
    origins=(
        Origin("flops_per_s memory_bytes", "published", "NVIDIA H100 SXM data sheet: bf16 dense, 80 GB."),
        Origin("inter_bytes_per_s", "published", "NVIDIA DGX H100 data sheet: 400 Gb/s a GPU."),
        *_DISTCA,
        _CUSTOMARY,
        _BF16,
    ),
)

_PRESETS = (
    _H100,
    replace(
        _H100,
        name="h200",
        memory_bytes=141 * 10**9,
        origins=(
            Origin("flops_per_s", "published", "NVIDIA H200 SXM data sheet: bf16 dense, as H100."),
            Origin("inter_bytes_per_s", "published", "NVIDIA DGX H200 data sheet: 400 Gb/s a GPU."),
            Origin("memory_bytes", "published", "NVIDIA H200 SXM data sheet: 141 GB."),
            *_DISTCA,
            _CUSTOMARY,
            _BF16,
        ),
    ),
    Hardware(
        name="a100",
        flops_per_s=312e12,
        matmul_efficiency=0.6,
        attention_efficiency=0.5,
        memory_bytes=80 * 10**9,
        intra_bytes_per_s=230e9,
        intra_latency_s=10e-6,
        inter_bytes_per_s=25e9,
        inter_latency_s=20e-6,
        pack_overhead_s=150e-6,
        ring_step_overhead_s=20e-6,
        sample_overhead_s=7e-6,
        element_bytes=2,
        origins=(
            Origin("flops_per_s memory_bytes", "published", "NVIDIA A100 SXM data sheet: bf16 dense, 80 GB."),
            Origin("inter_bytes_per_s", "published", "NVIDIA DGX A100 data sheet: 200 Gb/s a GPU."),
            Origin("intra_bytes_per_s", "derived", "A100 data sheet, NVLink 300 GB/s one way, times 0.77."),
            Origin(
                "attention_efficiency",
                "published",
                "About what FlashAttention-2 (arXiv 2307.08691) reports, forward and backward.",
            ),
            Origin(
                "pack_overhead_s sample_overhead_s ring_step_overhead_s",
                "derived",
                "Those of h100, times 1.5, 1.4 and 1.3.",
            ),
            Origin(
                "matmul_efficiency intra_latency_s inter_latency_s",
                "assumed",
                "Customary values; nobody measured them for FlexCP.",
            ),
            _BF16,
        ),
    ),
    Hardware(
        name="ascend-910c",
        flops_per_s=376e12,
        matmul_efficiency=0.55,
        attention_efficiency=0.35,
        memory_bytes=64 * 10**9,
        intra_bytes_per_s=150e9,
        intra_latency_s=20e-6,
        inter_bytes_per_s=25e9,
        inter_latency_s=30e-6,
        pack_overhead_s=200e-6,
        ring_step_overhead_s=30e-6,
        sample_overhead_s=10e-6,
        element_bytes=2,
        origins=(
            Origin(
                "memory_bytes",
                "published",
                "One of the two dies of a package, 64 GB as in the FCP paper (arXiv 2602.21788).",
            ),
            Origin(
                "flops_per_s inter_bytes_per_s",
                "published",
                "Half of what is published for the package (CloudMatrix384, arXiv 2506.12708).",
            ),
            Origin(
                "intra_bytes_per_s",
                "derived",
                "Half of what is published for the package (CloudMatrix384, arXiv 2506.12708), times 3/4.",
            ),
            Origin(
                f"attention_efficiency pack_overhead_s sample_overhead_s {_LATENCIES}",
                "assumed",
                "The shares of h100, and about twice its overheads and latencies; nothing here was measured.",
            ),
            _BF16,
        ),
    ),
    Hardware(
        name="cpu",
        flops_per_s=97e9,
        matmul_efficiency=0.5,
        attention_efficiency=0.8,
        memory_bytes=4 * 2**30,
        intra_bytes_per_s=0.6e9,
        intra_latency_s=0.55e-3,
        inter_bytes_per_s=0.6e9,
        inter_latency_s=0.55e-3,
        pack_overhead_s=1.5e-3,
        ring_step_overhead_s=2.2e-3,
        sample_overhead_s=0.1e-3,
        element_bytes=4,
        origins=(
            Origin(
                "flops_per_s",
                "measured",
                "For FlexCP, one core of an x86 server with AVX-512, torch 2.13, fp32: products of 1024 to "
                "2048.",
            ),
            Origin(
                "attention_efficiency",
                "measured",
                "The same core: flash attention of torch, 8 heads x 64, 4096 causal, 757 ms forward and "
                "backward.",
            ),
            Origin(
                "matmul_efficiency pack_overhead_s",
                "measured",
                "The same core: a Qwen3 of 4 layers x 128, forward and backward without checkpointing, takes "
                "9.1, 19.1, 72.5 and 449 ms on 32, 128, 512 and 2048 tokens.",
            ),
            Origin(
                "ring_step_overhead_s",
                "measured",
                "The same model on 32 to 4096 tokens takes 22 to 32 ms more on two ranks than half of one.",
            ),
            Origin(
                "intra_bytes_per_s intra_latency_s inter_bytes_per_s inter_latency_s",
                "measured",
                "gloo ring steps between processes of one machine.",
            ),
            Origin("memory_bytes sample_overhead_s", "assumed", "Round numbers."),
            Origin("element_bytes", "assumed", "Training in fp32."),
        ),
    ),
)
KINDS: tuple[Kind, ...] = ("measured", "published", "derived", "assumed")
HARDWARE = {preset.name: preset for preset in _PRESETS}


def hardware(name: str) -> Hardware:
    """Look a preset up by name.

    >>> hardware("h100").memory_bytes
    80000000000

    Raises:
        UnknownNameError: names the nearest preset and all of them.
    """
    try:
        return HARDWARE[name]
    except KeyError:
        raise UnknownNameError("hardware", name, HARDWARE) from None
