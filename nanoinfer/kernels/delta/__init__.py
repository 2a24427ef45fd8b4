"""The gated delta rule and causal convolutions: layers whose memory of the past has a fixed size."""
