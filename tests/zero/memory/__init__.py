"""How much memory does training take, and is it refused if there is too little?"""
