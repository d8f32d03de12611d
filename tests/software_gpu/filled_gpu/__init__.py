"""Do optimizer states fill the free memory of the GPU, without an error that stock does not have?"""
