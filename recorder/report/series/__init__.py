"""The numbers of series over steps as the page draws them: cubes, lanes, histograms, quantised for a screen."""
