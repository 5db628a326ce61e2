"""Memory of the model, forward and backward, tensor by tensor as in layer.py and model.py."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import LOSS_ROWS, ModelConfig
from .ledger import Ledger, Sizes
from .operator import Operator, operator_of


@dataclass(frozen=True)
class Model:
    """Account of an NSATransformer's pass from tokens to the loss and back.

    Attributes:
        config: the model.
        implementation: the attention's implementation.
        sizes: the attention's tensors.
        weight: bytes of an element of the weights, their gradients and the residual stream. If `sizes` has another,
            autocast is on: each linear layer keeps a cast copy of its input and of its weight.
    """

    config: ModelConfig
    implementation: str
    sizes: Sizes
    weight: int

    @property
    def parameters(self) -> int:
        """Elements of the model's weights."""
        c = self.config
        heads = 1 if c.tie_embeddings else 2
        layer = self._attention_parameters + self._ffn_parameters + 2 * c.dim
        return heads * c.vocab_size * c.dim + c.layers * layer + c.dim

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Account from tokens to the loss; with `grad`, the backward's tensors stay held."""
        with ledger.temporary(not grad):
            self._forward(ledger, grad)

    def _forward(self, ledger: Ledger, grad: bool) -> None:
        ledger.hold("activations", self._stream)  # the embedded tokens
        keeps = grad and not self.config.checkpointing
        for _ in range(self.config.layers):
            with ledger.temporary(not keeps):
                self._block_forward(ledger, keeps)
            ledger.hold("activations", self._stream)
            if not grad:
                ledger.release("activations", self._stream)  # the block's input
        self._norm_forward(ledger, grad)
        kept_by_autocast = 0 if keeps else self.config.layers * self._cast_weights
        ledger.hold("workspace", kept_by_autocast)  # until the forward pass ends; else released by each block
        self._loss_forward(ledger, grad)
        ledger.release("workspace", kept_by_autocast)

    def backward(self, ledger: Ledger) -> None:
        """Account from the loss to the gradients of all parameters."""
        c = self.config
        embedding = c.vocab_size * c.dim * self.weight
        ledger.hold("workspace", self._stream)
        ledger.hold("gradients", embedding)  # of the head, cast to the weights' dtype
        ledger.release("activations", c.vocab_size * c.dim * 4 + self._rows)
        ledger.release("workspace", self._stream)
        self._norm_backward(ledger, self._stream)
        ledger.hold("workspace", self._stream)  # the gradient of the residual stream
        for _ in range(c.layers):
            ledger.release("activations", self._stream)  # the block's output, which only the next one needed
            with ledger.temporary(c.checkpointing):
                if c.checkpointing:
                    self._block_forward(ledger, grad=True)
                self._ffn_backward(ledger)
                self._attention_backward(ledger)
                ledger.release("activations", self._cast_weights)
        if c.tie_embeddings:
            ledger.touch(embedding)  # added to the head's
        else:
            ledger.hold("gradients", embedding)
        ledger.release("workspace", self._stream)
        ledger.release("activations", self._stream)

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream [B,S,dim]."""
        return self.sizes.tokens * self.config.dim * self.weight

    @property
    def _mixed(self) -> bool:
        return self.weight != self.sizes.element

    def _read(self, layers: int) -> int:
        """Bytes that `layers` linear layers keep of their common input [B,S,dim]."""
        return layers * self.sizes.tokens * self.config.dim * self.sizes.element if self._mixed else self._stream

    @property
    def _projections(self) -> int:
        """Number of linear layers on the attention's input: q, k, v and NSA's gates."""
        return 4 if self._sparse else 3

    @property
    def _cast_weights(self) -> int:
        """Bytes of a block's matrices as cast by autocast."""
        return (self._attention_parameters + self._ffn_parameters) * self.sizes.element if self._mixed else 0

    @property
    def _cast_head(self) -> int:
        """Bytes of the output head's matrix and of the rows it reads, as cast by autocast."""
        rows = min(LOSS_ROWS, self.sizes.tokens)
        return (self.config.vocab_size + rows) * self.config.dim * self.sizes.element if self._mixed else 0

    @property
    def _hidden(self) -> int:
        """Bytes of SwiGLU's hidden layer [B,S,ffn_dim]."""
        return self.sizes.tokens * self.config.ffn_dim * self.sizes.element

    @property
    def _logits(self) -> int:
        """Bytes of one chunk's logits in the loss, float32 [rows,V]."""
        return min(LOSS_ROWS, self.sizes.tokens) * self.config.vocab_size * 4

    @property
    def _sparse(self) -> bool:
        return self.implementation != "dense"

    @property
    def _operator(self) -> Operator:
        return operator_of(self.implementation, self.sizes, self.config.nsa, compresses=False)

    @property
    def _attention_parameters(self) -> int:
        c = self.config
        outer, inner = c.heads * c.head_dim, c.kv_heads * c.head_dim
        if not self._sparse:
            return c.dim * (2 * outer + 2 * inner)
        gates = (c.dim + 1) * 3 * c.heads
        compression = 0
        if c.nsa.compress == "mlp":
            block, dim = c.nsa.cmp_block, c.head_dim
            compression = block * dim + (block * dim + 1) * 2 * dim + (2 * dim + 1) * dim
        return c.dim * (2 * outer + 6 * inner) + gates + 2 * compression

    @property
    def _ffn_parameters(self) -> int:
        return 3 * self.config.dim * self.config.ffn_dim

    @property
    def _normalised(self) -> int:
        """Bytes of RMSNorm's result before its weight: kept on the CPU, where RMSNorm is not fused."""
        return self._stream if self.sizes.device.type == "cpu" else 0

    def _norm_forward(self, ledger: Ledger, grad: bool) -> None:
        """Account for RMSNorm's forward: holds its output and the tensors it keeps."""
        ledger.hold("activations", self._stream + (self._normalised if grad else 0))
        ledger.touch(self._stream)

    def _norm_read(self, ledger: Ledger, layers: int) -> None:
        """Replace RMSNorm's output by the copies that `layers` keep of it."""
        ledger.hold("activations", self._read(layers) - self._stream)

    def _norm_backward(self, ledger: Ledger, kept: int) -> None:
        """Account for RMSNorm's backward: releases `kept`, the bytes kept of its output."""
        ledger.touch(3 * self._stream)
        ledger.release("activations", kept + self._normalised)

    def _block_forward(self, ledger: Ledger, grad: bool) -> None:
        """Account for a block's forward: with `grad` holds all but its input and output, else nothing."""
        before = ledger.now["activations"]
        ledger.hold("activations", self._cast_weights)
        self._norm_forward(ledger, grad)
        self._norm_read(ledger, self._projections)
        self._attention_forward(ledger, grad)
        if not grad:
            ledger.release("activations", ledger.now["activations"] - before)
        ledger.hold("activations", self._stream)  # the residual stream between attention and feed-forward
        self._norm_forward(ledger, grad)
        self._norm_read(ledger, 2)
        if grad:
            ledger.hold("activations", 4 * self._hidden)  # gate, silu(gate), up, product
        else:
            ledger.touch(3 * self._hidden + self._stream)
        ledger.touch(2 * self._stream)
        if not grad:
            ledger.release("activations", ledger.now["activations"] - before)

    def _attention_inputs(self) -> int:
        """Bytes of the operator's inputs, which it keeps: rotated q and keys, values, gates, angles."""
        s = self.sizes
        angles = s.seq_len * s.dim * s.wide
        if not self._sparse:
            return s.q + 2 * s.kv + angles
        return s.q + 5 * s.kv + s.gates + angles + 2 * s.compressed(self.config.nsa)

    def _compression_kept(self) -> int:
        """Bytes kept by the learned compression: strides of keys and values, two hidden layers."""
        if self.config.nsa.compress == "mean" or not self._sparse:
            return 0
        return 2 * (self.config.nsa.cmp_stride + 4) * self.sizes.compressed(self.config.nsa)

    def _attention_forward(self, ledger: Ledger, grad: bool) -> None:
        s = self.sizes
        unrotated = 3 * s.kv if self._sparse else 0  # the projected keys; the compressed branch's remain in use
        ledger.hold("workspace", unrotated)
        ledger.hold("activations", self._attention_inputs())
        if grad:
            ledger.hold("activations", self._compression_kept())
        else:
            ledger.touch(self._compression_kept() // 2)  # keys, then values
        self._operator.forward(ledger, grad)
        ledger.release("workspace", unrotated)
        if grad:
            ledger.release("activations", self._operator.released)
        ledger.touch(2 * self._stream)

    def _loss_forward(self, ledger: Ledger, grad: bool) -> None:
        """Account for the loss by chunks: logits, log-sum-exp, targets' places; with `grad` holds its gradients.

        They are activations until the backward scales them: kept by the forward, and no parameter's gradient yet.
        """
        ledger.hold("workspace", self._cast_head)
        ledger.touch(9 * self._logits // 4)
        if grad:
            head = self.config.vocab_size * self.config.dim
            ledger.hold("activations", head * 4)
            ledger.touch(9 * self._logits // 4)
            ledger.touch(self._logits * self.sizes.element // 4 + head * self.sizes.element)
            ledger.hold("activations", self._rows)
            ledger.touch(self._rows)
        ledger.release("workspace", self._cast_head)

    @property
    def _rows(self) -> int:
        """Bytes of the gradient [B,S,dim] of the output head's input, in the dtype of products."""
        return self.sizes.tokens * self.config.dim * self.sizes.element

    def _ffn_backward(self, ledger: Ledger) -> None:
        weights = self.config.dim * self.config.ffn_dim * self.weight
        ledger.hold("gradients", weights)  # down
        ledger.touch(self._hidden)
        ledger.release("activations", self._hidden)  # the product
        ledger.touch(3 * self._hidden)  # gradients of product, silu(gate) and up
        ledger.release("activations", 2 * self._hidden)
        ledger.hold("gradients", weights)  # up
        ledger.touch(2 * self._hidden + self._stream)
        ledger.hold("gradients", weights)  # gate
        ledger.release("activations", self._hidden)
        self._norm_backward(ledger, self._read(2))
        ledger.release("activations", self._stream)  # the stream between attention and feed-forward

    def _attention_backward(self, ledger: Ledger) -> None:
        s = self.sizes
        before = ledger.now["gradients"]
        ledger.hold("workspace", s.q)  # the output's gradient
        if self._sparse:
            ledger.release("activations", s.q)  # the output: only the projection needed it
        self._operator.backward(ledger)
        if not self._sparse:
            ledger.release("activations", s.q)  # the kernel needed it as well
        ledger.release("workspace", s.q)
        kept = self._attention_inputs() - self._operator.released
        ledger.release("activations", kept + self._compression_kept())
        ledger.touch(3 * s.q)  # halves of q rotated back
        ledger.release("gradients", ledger.now["gradients"] - before)  # of q, k, v: no parameters
        ledger.hold("gradients", (self._attention_parameters + 2 * self.config.dim) * self.weight)
        self._norm_backward(ledger, self._read(self._projections))
