"""The class that every served model is made of: builds, plans, applies, runs and loads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors

from tfbackend import __version__, adapt, meta
from tfbackend.apply import apply_plan, settle, share_parameters
from tfbackend.graph.observe import call_keywords
from tfbackend.layers.loading import load
from tfbackend.layers.stages import HIDDEN, check_shared, this_stage
from tfbackend.mixins.decoder import Decoder
from tfbackend.plan import Plan, make_plan
from tfbackend.proof import Prover
from tfbackend.report import write_report
from tfbackend.weights import Ledger, build_weight_map

logger = init_logger("vllm.tfbackend")

MaybeTensor = torch.Tensor | None


class Base(nn.Module):
    """A Transformers base model served by vLLM.

    Attributes:
        model: the base model, rewritten.
        serving: what the engine asks for.
        plan: what was rewritten and why the rest was not.
        ledger: what became of each checkpoint tensor; None until weights were loaded.
        task: one of meta.TASKS, what it is served for.
        stage: the pipeline stage of this rank, None where there is one.
        seconds: how long planning with proofs and applying took.
    """

    task: ClassVar[str] = meta.GENERATE
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.config = vllm_config.model_config.hf_config
        self.model_config = vllm_config.model_config
        self.quant_config = vllm_config.quant_config
        self.ledger: Ledger | None = None
        self._build(prefix)

    def _build(self, prefix: str) -> None:
        directory = adapt.cache_directory()
        adapt.check_stages(self.vllm_config)
        model_config = self.model_config
        config, remote = adapt.hf_config(self.vllm_config), model_config.trust_remote_code
        built = meta.build(config, model_config.dtype, trust_remote_code=remote, task=self.task)
        begun = time.perf_counter()
        self.serving = adapt.serving_spec(self.vllm_config)
        self.plan: Plan = make_plan(built, self.serving, Prover(directory / "proofs"))
        planned = time.perf_counter()
        adapt.settle_alone(self.vllm_config, self.plan)
        adapt.settle_chunks(self.vllm_config, self.plan)
        if self.plan.masked:
            meta.give_masks(built)
        self._adopt(self.plan)
        adapt.settle_cache(self.vllm_config, self.plan)
        self.context = adapt.build_context(self.vllm_config)
        self.weight_map = build_weight_map(built.model, self.plan, quantized=self.quant_config is not None)
        path = f"{prefix}.model" if prefix else "model"
        self.stage = this_stage(self.plan.stages, self._inside_base(self.plan.embedding_path), tied=self.plan.tied)
        self.model = self.build_base(built, path)
        check_shared(self.weight_map.shared, self.stage, path)
        share_parameters(self, self.weight_map.shared)
        self.build_head(built, prefix)
        self.seconds = {"plan and proof": planned - begun, "apply": time.perf_counter() - planned}
        if not self.plan.alone:
            keywords = call_keywords(self.model, torch.empty(0))
            # A child, for vLLM looks among the modules for one that is compiled before it captures graphs in pieces.
            self.decoder = Decoder(vllm_config=self.vllm_config, prefix=path)
            self.decoder.serve(self.model, keywords, self.plan.numbering, self.stage)
        self._announce()

    def build_base(self, built: meta.MetaModel, prefix: str) -> nn.Module:
        """The base model with what the plan says, at path `prefix` of the served tree, parameters in memory."""
        forwards = adapt.cache_directory() / "forwards"
        base: nn.Module = apply_plan(self.plan, built.base, prefix, self.context, forwards, self.stage)
        return base

    def _adopt(self, plan: Plan) -> None:
        """Tell vLLM's quantization and LoRA what is called how, before any layer asks them."""
        self.hf_to_vllm_mapper = adapt.weights_mapper(plan)
        self.packed_modules_mapping = adapt.packed_modules(plan)
        if self.quant_config is not None:
            self.quant_config.apply_vllm_mapper(self.hf_to_vllm_mapper.get_rename_mapper())
            self.quant_config.packed_modules_mapping.update(self.packed_modules_mapping)

    def build_head(self, built: meta.MetaModel, prefix: str) -> None:
        """Build what follows the base model; mixins do."""

    def _announce(self) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        self.report_path = write_report(adapt.cache_directory() / "reports", self.plan)
        logger.info(
            "tfbackend %s serves %s: %s; %s; report: %s",
            __version__,
            self.plan.architecture,
            self.plan.summary,
            ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items()),
            self.report_path,
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        rows: torch.Tensor = self.input_embedding()(input_ids)
        return rows

    def input_embedding(self) -> nn.Module:
        """The vocabulary embedding as it is served. The full model names it; not every base model can."""
        base: nn.Module = self.model
        return base.get_submodule(self._inside_base(self.plan.embedding_path))

    def _inside_base(self, path: str) -> str:
        return path.removeprefix(f"{self.plan.base_path}.") if self.plan.base_path else path

    def forward(
        self,
        input_ids: MaybeTensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: MaybeTensor = None,
        **_: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """Run the base model, or what this pipeline stage has of it.

        Args:
            input_ids: [tokens], or None where `inputs_embeds` is given.
            positions: [tokens].
            intermediate_tensors: what the stage before gave; None on the first.
            inputs_embeds: [tokens, hidden].

        Returns:
            Hidden states [tokens, hidden]; those that the next stage goes on with under a name of their own.
        """
        received = intermediate_tensors[HIDDEN] if intermediate_tensors is not None else None
        hidden: torch.Tensor = self.decoder(input_ids, positions, inputs_embeds, received=received)
        return IntermediateTensors({HIDDEN: hidden}) if self.stage is not None and self.stage.follows else hidden

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """Where a stage receives what the one before it gave: [batch_size, hidden]."""
        assert self.plan.stages is not None
        hidden = torch.zeros(batch_size, self.plan.stages.width, dtype=dtype, device=device)
        return IntermediateTensors({HIDDEN: hidden})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, completely or not at all; see layers.loading.load for what is raised."""
        quantized, source = self.quant_config is not None, self.model_config.model
        loaded, self.ledger = load(self, self.weight_map, weights, quantized=quantized, source=source)
        if get_tensor_model_parallel_rank() == 0:
            write_report(adapt.cache_directory() / "reports", self.plan, self.ledger)
        settle(self.model, self.plan.settling)
        return loaded
