" Fills the gap at the cursor as llama.vim does: the same fields and values, sent by curl from a job, its texts of other
" places stamped with reltime(). Wants g:endpoint, g:lnum, g:col (bytes before the cursor) and g:other, a file.

let s:curl = ['curl', '--silent', '--no-buffer', '--request', 'POST', '--url', g:endpoint,
  \ '--header', 'Content-Type: application/json', '--data', '@-']
let s:reply = ''
let s:over = 0

function! s:Took(channel, text)
  let s:reply .= a:text
endfunction

function! s:Ended(job, status)
  let s:over = 1
endfunction

function! s:Post(request)
  let s:reply = ''
  let s:over = 0
  let l:job = job_start(s:curl, {'out_cb': function('s:Took'), 'exit_cb': function('s:Ended')})
  let l:channel = job_getchannel(l:job)
  call ch_sendraw(l:channel, json_encode(a:request))
  call ch_close_in(l:channel)
  for l:turn in range(2000)
    if s:over && ch_status(l:channel) !=# 'open'
      break
    endif
    sleep 10m
  endfor
  return s:reply
endfunction

let s:extra = [{'text': join(readfile(g:other), "\n") . "\n", 'time': reltime(), 'filename': g:other}]

" What it sends while nobody types, so that the server has read the texts already.
let s:warmed = s:Post({
  \ 'id_slot': 0, 'input_prefix': '', 'input_suffix': '', 'input_extra': s:extra, 'prompt': '', 'n_predict': 0,
  \ 'temperature': 0.0, 'stream': v:false, 'samplers': [], 'cache_prompt': v:true, 't_max_prompt_ms': 1,
  \ 't_max_predict_ms': 1, 'response_fields': ['']})

let s:line = getline(g:lnum)
let s:before = g:lnum == 1 ? '' : join(getline(1, g:lnum - 1), "\n") . "\n"
let s:behind = strpart(s:line, g:col) . "\n" . join(getline(g:lnum + 1, '$'), "\n") . "\n"
let s:filled = s:Post({
  \ 'id_slot': 0, 'input_prefix': s:before, 'input_suffix': s:behind, 'input_extra': s:extra,
  \ 'prompt': strpart(s:line, 0, g:col), 'n_predict': 128, 'stop': [], 'n_indent': indent(g:lnum), 'top_k': 40,
  \ 'top_p': 0.90, 'stream': v:false, 'samplers': ['top_k', 'top_p', 'infill'], 'cache_prompt': v:true,
  \ 't_max_prompt_ms': 500, 't_max_predict_ms': 1000, 'response_fields': ['content', 'timings/prompt_n',
  \ 'timings/prompt_ms', 'timings/prompt_per_token_ms', 'timings/prompt_per_second', 'timings/predicted_n',
  \ 'timings/predicted_ms', 'timings/predicted_per_token_ms', 'timings/predicted_per_second', 'truncated',
  \ 'tokens_cached']})

call writefile([s:warmed, s:filled], g:replies)
if s:filled =~# '"content"\s*:'
  let s:content = split(json_decode(s:filled)['content'], "\n", 1)
  call setline(g:lnum, strpart(s:line, 0, g:col) . s:content[0] . strpart(s:line, g:col))
  write
endif
qall!
