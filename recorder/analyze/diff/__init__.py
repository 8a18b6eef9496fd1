"""Where two runs differ: values are paired whatever the layouts, judged against noise, and traced to a module."""
