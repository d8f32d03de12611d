"""Are the plans, schedules and predictions of ``perf_model`` right?"""
