"""Values that the program names, or would: scalars such as the loss, the labels of the loss, taps and objectives."""
