"""Words that every room shares: axes, quantities, points, states, plans, text made safe."""
