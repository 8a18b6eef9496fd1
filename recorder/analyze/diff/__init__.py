"""Where two runs differ: values paired whatever the layouts, judged against noise, and the modules that caused it."""
