-- Inline completion and predicted edits from a specdec server. Copy to lua/specdec.lua in your configuration, and:
--   require('specdec').setup({ server = '127.0.0.1:8400' })
-- It needs Neovim 0.10 or later.
local M = {}

-- The language server's last status: { state, message, model, nextEdits }; nextEdits says why no edits are predicted.
M.status = nil

local METHOD = 'textDocument/inlineCompletion'
local EDIT_METHOD = 'textDocument/copilotInlineEdit'
local INVOKED, AUTOMATIC = 1, 2
local namespace = vim.api.nvim_create_namespace('specdec')

local defaults = {
  cmd = { 'specdec', 'lsp' },
  server = '127.0.0.1:8400',
  args = {}, -- more arguments, such as { '--key-file', 'FILE', '--tls' }
  settings = {}, -- initializationOptions of `specdec lsp`: mode, maxLines, ...
  root_markers = { '.git' },
  keys = {
    accept = '<Tab>', accept_word = '<M-Right>', accept_line = '<M-Down>', dismiss = '<C-]>',
    dismiss_edit = '<Esc>', invoke = '<M-Bslash>', next = '<M-]>', previous = '<M-[>',
  },
}

-- Before 0.11 a client's methods take no self, and functions of strings no encoding.
local is_recent = vim.fn.has('nvim-0.11') == 1

local function call(client, name, ...)
  if is_recent then
    return client[name](client, ...)
  end
  return client[name](...)
end

local function client_of(buffer)
  return vim.lsp.get_clients({ name = 'specdec', bufnr = buffer })[1]
end

-- The byte of `line` at a position's character.
local function byte_of(line, character, encoding)
  if is_recent then
    return vim.str_byteindex(line, encoding, character, false)
  elseif encoding == 'utf-8' then
    return math.min(character, #line)
  end
  local ok, byte = pcall(vim.str_byteindex, line, character, encoding == 'utf-16')
  return ok and byte or #line
end

-- The length of `text` in UTF-16 units, the unit of outcomes.
local function units(text)
  if is_recent then
    return vim.str_utfindex(text, 'utf-16')
  end
  return select(2, vim.str_utfindex(text))
end

-- The first word of `text`, with the white space before it. Bytes of non-ASCII characters count as letters.
local function first_word(text)
  return text:match('^%s*[%w_\128-\255]+') or text:match('^%s*[^%w_%s]+') or text
end

-- The first line of `text`, with the line ends before it.
local function first_line(text)
  return text:match('^\n*[^\n]+') or text
end

local function configuration(options)
  local cmd = vim.list_extend({}, options.cmd)
  vim.list_extend(cmd, { '--server', options.server })
  vim.list_extend(cmd, options.args)
  return {
    name = 'specdec',
    cmd = cmd,
    init_options = options.settings,
    -- Without the capability the server would offer the suggestion in the menu of completions.
    capabilities = vim.tbl_deep_extend('force', vim.lsp.protocol.make_client_capabilities(), {
      textDocument = { inlineCompletion = { dynamicRegistration = false } },
    }),
    handlers = {
      ['specdec/didChangeStatus'] = function(_, status)
        M.status = status
        vim.cmd.redrawstatus()
      end,
    },
    on_exit = function(code)
      M.status = { state = 'away', message = 'specdec lsp has ended with code ' .. code, model = '', nextEdits = '' }
      vim.schedule(vim.cmd.redrawstatus)
    end,
  }
end

-- The displayed suggestion: the answer's items and the index of this one, its begin (row, column, from 0), its text, and
-- the part already typed.
local shown = nil
local waiting = {} -- the pending request of each method: client, id
local place = nil -- cursor and text version of the last request

-- Reports what became of the displayed suggestion or predicted edit `of`.
local function notify(method, of, more)
  local client = client_of(of.buffer)
  if client then
    call(client, 'notify', 'textDocument/did' .. method, vim.tbl_extend('force', { item = of.item }, more or {}))
  end
end

local function hide()
  if shown then
    vim.api.nvim_buf_clear_namespace(shown.buffer, namespace, 0, -1)
    shown = nil
  end
end

-- `lines` as lines of their own.
local function virtual_lines(lines, highlight)
  return vim.tbl_map(function(line)
    return { { line, highlight } }
  end, lines)
end

local function draw()
  vim.api.nvim_buf_clear_namespace(shown.buffer, namespace, 0, -1)
  local lines = vim.split(shown.text:sub(#shown.typed + 1), '\n', { plain = true })
  vim.api.nvim_buf_set_extmark(shown.buffer, namespace, shown.row, shown.column + #shown.typed, {
    virt_text = { { lines[1], 'Comment' } },
    virt_text_pos = 'inline',
    virt_lines = #lines > 1 and virtual_lines(vim.list_slice(lines, 2), 'Comment') or nil,
  })
end

-- Whether the text before the cursor is a prefix of the suggestion; if so, draws the rest, or hides it without one.
local function follow(buffer)
  if not shown or shown.buffer ~= buffer then
    return false
  end
  local row, column = unpack(vim.api.nvim_win_get_cursor(0))
  if row - 1 ~= shown.row or column < shown.column then
    return false
  end
  local typed = vim.api.nvim_buf_get_text(buffer, shown.row, shown.column, shown.row, column, {})[1]
  if not vim.startswith(shown.text, typed) then
    return false
  end
  shown.typed = typed
  if typed == shown.text then
    hide()
  else
    draw()
  end
  return true
end

local function cancel(method)
  local asked = waiting[method]
  if asked then
    waiting[method] = nil
    call(asked.client, 'cancel_request', asked.id)
  end
end

-- Sends a request for the cursor. `take(result, client)` gets the answer while the buffer is current.
local function send(method, kind, take)
  local buffer = vim.api.nvim_get_current_buf()
  local client = client_of(buffer)
  if not client then
    return
  end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  params.textDocument.version = vim.lsp.util.buf_versions[buffer]
  params.context = { triggerKind = kind }
  local asked = { client = client }
  local sent, id = call(client, 'request', method, params, function(failed, result)
    if waiting[method] ~= asked then
      return
    end
    waiting[method] = nil
    if not failed and result and vim.api.nvim_get_current_buf() == buffer then
      take(result, client)
    end
  end, buffer)
  if sent then
    asked.id = id
    waiting[method] = asked
  end
end

-- `text` with the line breaks of Neovim's API. The language server gets "\r\n" from buffers whose `fileformat` is dos, and
-- answers with it.
local function with_line_feeds(text)
  return (text:gsub('\r\n', '\n'))
end

local function show(buffer, items, index, client)
  local item = items[index]
  local line = vim.api.nvim_buf_get_lines(buffer, item.range.start.line, item.range.start.line + 1, false)[1] or ''
  hide()
  shown = { buffer = buffer, items = items, index = index, item = item, row = item.range.start.line }
  shown.column = byte_of(line, item.range.start.character, client.offset_encoding)
  shown.text = with_line_feeds(item.insertText)
  shown.typed = ''
  if follow(buffer) then
    notify('ShowCompletion', shown)
  else
    hide()
  end
end

-- Shows the answer's first item, or the one `step` further.
local function request(kind, step)
  send(METHOD, kind, function(result, client)
    if result[1] and vim.startswith(vim.api.nvim_get_mode().mode, 'i') then
      show(vim.api.nvim_get_current_buf(), result, (step or 0) % #result + 1, client)
    end
  end)
end

-- Replaces a range of the current buffer by `text`, and puts the cursor behind that. It is a change of its own for undo.
local function replace(row, column, end_row, end_column, text)
  local lines = vim.split(text, '\n', { plain = true })
  vim.bo.undolevels = vim.bo.undolevels
  vim.api.nvim_buf_set_text(0, row, column, end_row, end_column, lines)
  local last = #lines == 1 and column + #text or #lines[#lines]
  vim.api.nvim_win_set_cursor(0, { row + #lines, last })
end

-- Inserts the next part `text` of the suggestion.
local function insert(text)
  local row, column = shown.row, shown.column + #shown.typed
  replace(row, column, row, column, text)
end

local function run_command(client, command)
  if client and command then
    local params = { command = command.command, arguments = command.arguments }
    call(client, 'request', 'workspace/executeCommand', params, function() end)
  end
end

local actions = {}

function actions.accept()
  local rest, client, command = shown.text:sub(#shown.typed + 1), client_of(shown.buffer), shown.item.command
  insert(rest)
  hide()
  run_command(client, command)
end

-- Inserts the part of the suggestion's rest that `first` returns. After a line end nothing is left on the line: the rest
-- comes with the next request, which continues the same text.
local function accept_part(first)
  local part = first(shown.text:sub(#shown.typed + 1))
  if #shown.typed + #part == #shown.text then
    return actions.accept()
  end
  insert(part)
  local typed = shown.typed .. part
  notify('PartiallyAcceptCompletion', shown, { acceptedLength = units(typed) })
  if not follow(shown.buffer) then
    hide()
  end
end

function actions.accept_word()
  accept_part(first_word)
end

function actions.accept_line()
  accept_part(first_line)
end

-- Shows the item `step` further. A suggestion that came while typing has no others: it asks for them.
local function cycle(step)
  if not shown or #shown.items == 1 then
    return request(INVOKED, step)
  end
  local index = (shown.index - 1 + step) % #shown.items + 1
  show(shown.buffer, shown.items, index, client_of(shown.buffer))
end

function actions.dismiss()
  notify('DismissCompletion', shown)
  hide()
end

local edit_namespace = vim.api.nvim_create_namespace('specdec.edit')
-- The displayed edit: its buffer and text version, the item, and the rows and byte columns (from 0) that it replaces.
local predicted = nil

local function hide_edit()
  if predicted then
    pcall(vim.api.nvim_buf_clear_namespace, predicted.buffer, edit_namespace, 0, -1)
    predicted = nil
  end
end

-- Draws the removed text highlighted, and the new text in the line if it is a part of one, else in lines of its own.
local function draw_edit()
  local edit, mark = predicted, {}
  local lines = vim.split(edit.item.text, '\n', { plain = true })
  local first = vim.api.nvim_buf_get_lines(edit.buffer, edit.row, edit.row + 1, false)[1] or ''
  local last = vim.api.nvim_buf_get_lines(edit.buffer, edit.end_row, edit.end_row + 1, false)[1] or ''
  local empty = edit.row == edit.end_row and edit.column == edit.end_column
  if #lines == 1 then
    mark = { virt_text = { { lines[1], 'DiffAdd' } }, virt_text_pos = 'inline' }
  elseif empty and edit.column == 0 and lines[#lines] == '' then
    mark = { virt_lines = virtual_lines(vim.list_slice(lines, 1, #lines - 1), 'DiffAdd'), virt_lines_above = true }
  elseif empty and edit.column == #first and lines[1] == '' then
    mark = { virt_lines = virtual_lines(vim.list_slice(lines, 2), 'DiffAdd') }
  else
    lines[1] = first:sub(1, edit.column) .. lines[1]
    lines[#lines] = lines[#lines] .. last:sub(edit.end_column + 1)
    mark = { virt_lines = virtual_lines(lines, 'DiffAdd') }
  end
  if not empty then
    local removed = { end_row = edit.end_row, end_col = edit.end_column, hl_group = 'DiffDelete' }
    vim.api.nvim_buf_set_extmark(edit.buffer, edit_namespace, edit.row, edit.column, removed)
  end
  vim.api.nvim_buf_set_extmark(edit.buffer, edit_namespace, edit.end_row, edit.end_column, mark)
end

-- A buffer has no position behind the last line break of its text. Moves an `edit` from there to before that line break.
local function keep_inside(edit)
  local last = vim.api.nvim_buf_line_count(edit.buffer) - 1
  if edit.end_row <= last then
    return
  end
  edit.end_row, edit.end_column = last, #vim.api.nvim_buf_get_lines(edit.buffer, last, last + 1, false)[1]
  edit.item.text = edit.item.text:gsub('\n$', '')
  if edit.row > last then
    edit.row, edit.column, edit.item.text = edit.end_row, edit.end_column, '\n' .. edit.item.text
  end
end

-- Shows an insertion at the cursor as ghost text while typing, and any other edit as a small diff.
local function show_edit(buffer, item, client)
  local function column_of(position)
    local line = vim.api.nvim_buf_get_lines(buffer, position.line, position.line + 1, false)[1] or ''
    return byte_of(line, position.character, client.offset_encoding)
  end
  local from, to = item.range.start, item.range['end']
  local column, end_column = column_of(from), column_of(to)
  local row, cursor = unpack(vim.api.nvim_win_get_cursor(0))
  local at_cursor = from.line == row - 1 and to.line == row - 1 and column == cursor and end_column == cursor
  if at_cursor and vim.startswith(vim.api.nvim_get_mode().mode, 'i') then
    if not shown then
      show(buffer, { { insertText = item.text, range = item.range, command = item.command } }, 1, client)
    end
    return
  end
  item.text = with_line_feeds(item.text)
  predicted = {
    buffer = buffer, tick = vim.api.nvim_buf_get_changedtick(buffer), item = item,
    row = from.line, column = column, end_row = to.line, end_column = end_column,
  }
  keep_inside(predicted)
  draw_edit()
  notify('ShowCompletion', predicted)
end

-- Requests an edit, unless one is displayed. The language server waits for the next key.
local function follow_edits(buffer, tick)
  if predicted and (predicted.buffer ~= buffer or predicted.tick ~= tick) then
    hide_edit()
  end
  if predicted then
    return
  end
  cancel(EDIT_METHOD)
  send(EDIT_METHOD, AUTOMATIC, function(result, client)
    if result.edits[1] and vim.api.nvim_buf_get_changedtick(buffer) == tick then
      show_edit(buffer, result.edits[1], client)
    end
  end)
end

-- Moves the cursor to the edit, or makes the edit if the cursor is in its lines.
function actions.jump_or_take()
  local edit = predicted
  local row = vim.api.nvim_win_get_cursor(0)[1] - 1
  if row < edit.row or row > edit.end_row then
    vim.cmd("normal! m'")
    return vim.api.nvim_win_set_cursor(0, { edit.row + 1, edit.column })
  end
  hide_edit()
  replace(edit.row, edit.column, edit.end_row, edit.end_column, edit.item.text)
  run_command(client_of(edit.buffer), edit.item.command)
end

function actions.dismiss_edit()
  notify('DismissCompletion', predicted)
  hide_edit()
end

local function attach(options)
  local group = vim.api.nvim_create_augroup('specdec', { clear = true })
  vim.api.nvim_create_autocmd({
    'InsertEnter', 'TextChanged', 'TextChangedI', 'TextChangedP', 'CursorMoved', 'CursorMovedI',
  }, {
    group = group,
    callback = function(event)
      local tick = vim.api.nvim_buf_get_changedtick(event.buf)
      local now = table.concat(vim.api.nvim_win_get_cursor(0), ':') .. ':' .. tick .. ':' .. event.buf
      if now == place and event.event ~= 'InsertEnter' then
        return
      end
      place = now
      cancel(METHOD)
      if shown and not follow(event.buf) then
        if shown.buffer == event.buf and vim.api.nvim_get_current_buf() == event.buf then
          notify('DismissCompletion', shown)
        end
        hide()
      end
      follow_edits(event.buf, tick)
      if event.event == 'InsertEnter' or vim.startswith(vim.api.nvim_get_mode().mode, 'i') then
        request(AUTOMATIC)
      end
    end,
  })
  vim.api.nvim_create_autocmd({ 'InsertLeave', 'BufLeave' }, {
    group = group,
    callback = function(event)
      place = nil
      cancel(METHOD)
      hide()
      if event.event == 'BufLeave' then
        cancel(EDIT_METHOD)
        hide_edit()
      end
    end,
  })
  vim.api.nvim_create_autocmd('FileType', {
    group = group,
    callback = function(event)
      if vim.bo[event.buf].buftype == '' then
        local config = configuration(options)
        config.root_dir = vim.fs.root(event.buf, options.root_markers)
        vim.lsp.start(config, { bufnr = event.buf })
      end
    end,
  })
end

-- Maps `key` to the function that `choose()` returns; the key keeps its meaning where that is nil. The function runs once
-- the key is handled: a key mapping with `expr` must not change the text.
local function map(key, choose, modes)
  if key then
    vim.keymap.set(modes or 'i', key, function()
      if not choose() then
        return key
      end
      vim.schedule(function()
        local action = choose()
        if action then
          action()
        end
      end)
      return ''
    end, { expr = true, desc = 'specdec' })
  end
end

-- For `map`: the action for the displayed suggestion, else the one for the predicted edit, else nil.
local function on(suggestion, edit)
  return function()
    return shown and suggestion or predicted and edit
  end
end

-- For `map`: `action(argument)`, whatever is displayed.
local function always(action, argument)
  return function()
    return function()
      action(argument)
    end
  end
end

function M.setup(given)
  if vim.fn.has('nvim-0.10') == 0 then
    return vim.notify('specdec needs Neovim 0.10 or later', vim.log.levels.ERROR)
  end
  local options = vim.tbl_deep_extend('force', defaults, given or {})
  local keys = options.keys
  attach(options)
  map(keys.accept, on(actions.accept, actions.jump_or_take), { 'i', 'n' })
  map(keys.accept_word, on(actions.accept_word))
  map(keys.accept_line, on(actions.accept_line))
  map(keys.dismiss, on(actions.dismiss, actions.dismiss_edit))
  map(keys.dismiss_edit, on(nil, actions.dismiss_edit), 'n')
  map(keys.invoke, always(request, INVOKED))
  map(keys.next, always(cycle, 1))
  map(keys.previous, always(cycle, -1))
end

-- The text that the accept key would insert; nil if nothing is displayed.
function M.suggestion()
  return shown and shown.text:sub(#shown.typed + 1)
end

return M
