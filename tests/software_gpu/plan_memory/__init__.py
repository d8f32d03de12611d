"""Does a plan take as much memory of the GPU as predicted?"""
