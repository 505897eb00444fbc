"""The float64 reference: a loss, a step, an optimizer, as plain as possible."""
