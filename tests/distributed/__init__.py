"""AccumulatingOptimizer; a package, as another folder has files of these names too."""
